//! What slices say, from what the API may write.

use router_core::Role;
use serde_json::{Value, json};

use super::*;

fn kind() -> Kind {
    Kind { scheme: "http", prefix: None, role: Role::Generate, bootstrap_port: None, dp_ranks: None }
}

/// A slice with one port, and endpoints of this form.
fn slice(name: &str, family: &str, endpoints: &Value) -> Value {
    let ports = json!([{"name": "http", "port": 8000, "protocol": "TCP"}]);
    json!({"metadata": {"name": name, "resourceVersion": "1"}, "addressType": family, "ports": ports,
        "endpoints": endpoints})
}

fn pod(name: &str, address: &str, conditions: &Value) -> Value {
    let target = json!({"kind": "Pod", "name": name, "uid": format!("uid-of-{name}")});
    json!({"addresses": [address], "conditions": conditions, "targetRef": target})
}

fn slices(items: &[Value]) -> Slices {
    let list = json!({"metadata": {"resourceVersion": "7"}, "items": items}).to_string();
    let mut slices = Slices::default();
    assert_eq!(slices.replace(list.as_bytes()).unwrap(), "7");
    slices
}

/// Of each worker its id and address, and a `-` behind it if new requests are withheld.
fn told_with(slices: &Slices, choice: &PortChoice) -> Vec<String> {
    let tell = |found: Found| {
        let mark = if found.new_requests == NewRequests::Withheld { " -" } else { "" };
        format!("{} {}{mark}", found.spec.id, found.spec.address)
    };
    slices.told(&kind(), choice).found.into_iter().map(tell).collect()
}

fn told(items: &[Value]) -> Vec<String> {
    told_with(&slices(items), &PortChoice::Only)
}

#[test]
fn pods_of_several_slices_are_workers_once() {
    let ready = json!({"ready": true});
    let one = slice("one", "IPv4", &json!([pod("b", "10.0.0.2", &ready), pod("a", "10.0.0.1", &ready)]));
    let two = slice("two", "IPv4", &json!([pod("c", "10.0.0.3", &ready), pod("a", "10.0.0.1", &ready)]));
    let expected = ["a http://10.0.0.1:8000", "b http://10.0.0.2:8000", "c http://10.0.0.3:8000"];
    assert_eq!(told(&[one, two]), expected);
}

#[test]
fn what_is_not_said_is_ready() {
    for conditions in [json!(null), json!({}), json!({"ready": null, "terminating": null})] {
        let one = slice("one", "IPv4", &json!([pod("a", "10.0.0.1", &conditions)]));
        assert_eq!(told(&[one]), ["a http://10.0.0.1:8000"], "{conditions}");
    }
    let without = json!([{"addresses": ["10.0.0.1"]}]);
    assert_eq!(told(&[slice("one", "IPv4", &without)]), ["10.0.0.1-8000 http://10.0.0.1:8000"]);
}

#[test]
fn slices_may_be_empty_in_every_way() {
    let bare = json!({"metadata": {"name": "bare"}, "addressType": "IPv4"});
    let null = json!({"metadata": {"name": "null"}, "addressType": "IPv4", "endpoints": null, "ports": null});
    let odd = json!([{}, {"addresses": null}, {"addresses": []}, {"addresses": ["nonsense"]}]);
    let names = slice("names", "FQDN", &json!([pod("a", "a.example", &json!({}))]));
    assert_eq!(told(&[bare, null, slice("odd", "IPv4", &odd), names]), [""; 0]);
    let mut slices = Slices::default();
    assert_eq!(slices.replace(br#"{"metadata": {"resourceVersion": "3"}, "items": null}"#).unwrap(), "3");
    assert!(slices.is_empty());
}

#[test]
fn who_is_terminating_gets_nothing_new_even_if_it_is_said_to_be_ready() {
    // So it is where a Service publishes addresses that are not ready.
    let leaving = json!({"ready": true, "serving": true, "terminating": true});
    let endpoints = json!([pod("a", "10.0.0.1", &leaving), pod("b", "10.0.0.2", &json!({}))]);
    let expected = ["a http://10.0.0.1:8000 -", "b http://10.0.0.2:8000"];
    assert_eq!(told(&[slice("one", "IPv4", &endpoints)]), expected);
    // The last one is better than nobody, as long as it serves.
    let last = |conditions| slice("one", "IPv4", &json!([pod("a", "10.0.0.1", conditions)]));
    assert_eq!(told(&[last(&leaving)]), ["a http://10.0.0.1:8000"]);
    let ending = json!({"ready": false, "serving": false, "terminating": true});
    assert_eq!(told(&[last(&ending)]), ["a http://10.0.0.1:8000 -"]);
}

#[test]
fn who_is_not_ready_gets_nothing_new_while_another_is() {
    let not_ready = json!({"ready": false, "serving": false, "terminating": false});
    let endpoints = json!([pod("a", "10.0.0.1", &not_ready), pod("b", "10.0.0.2", &json!({"ready": true}))]);
    let expected = ["a http://10.0.0.1:8000 -", "b http://10.0.0.2:8000"];
    assert_eq!(told(&[slice("one", "IPv4", &endpoints)]), expected);
    let leaving = json!({"ready": true, "terminating": true});
    let endpoints = json!([pod("a", "10.0.0.1", &not_ready), pod("b", "10.0.0.2", &leaving)]);
    let expected = ["a http://10.0.0.1:8000", "b http://10.0.0.2:8000"];
    assert_eq!(told(&[slice("one", "IPv4", &endpoints)]), expected, "nobody is ready and stays");
}

#[test]
fn a_pod_with_both_families_keeps_one_address_whatever_is_said_of_either() {
    for (four, six) in [(true, true), (true, false), (false, true)] {
        let of = |ready: bool| json!({"ready": ready});
        let one = slice("four", "IPv4", &json!([pod("a", "10.0.0.1", &of(four))]));
        let two = slice("a-six", "IPv6", &json!([pod("a", "fd00::1", &of(six))]));
        assert_eq!(told(&[two, one]), ["a http://10.0.0.1:8000"]);
    }
    let alone = slice("six", "IPv6", &json!([pod("a", "fd00::1", &json!({}))]));
    assert_eq!(told(&[alone]), ["a http://[fd00::1]:8000"]);
}

#[test]
fn of_two_pods_with_one_name_or_one_address_the_one_that_stays_is_told() {
    let leaving = json!({"ready": false, "terminating": true});
    let mut successor = pod("a", "10.0.0.9", &json!({"ready": true}));
    successor["targetRef"]["uid"] = "another".into();
    let one = slice("one", "IPv4", &json!([pod("a", "10.0.0.1", &leaving)]));
    let two = slice("two", "IPv4", &json!([successor]));
    assert_eq!(told(&[one.clone(), two]), ["a http://10.0.0.9:8000"]);
    // Its address has been given to another.
    let two = slice("two", "IPv4", &json!([pod("b", "10.0.0.1", &json!({}))]));
    assert_eq!(told(&[one, two]), ["b http://10.0.0.1:8000"]);
}

#[test]
fn ports_are_chosen_by_name_by_number_or_because_there_is_no_other() {
    let with_ports = |ports: Value| {
        let mut one = slice("one", "IPv4", &json!([pod("a", "10.0.0.1", &json!({}))]));
        one["ports"] = ports;
        slices(&[one])
    };
    let (named, number) = (|name: &str| PortChoice::Named(name.to_owned()), PortChoice::Number);
    let several =
        json!([{"name": "metrics", "port": 9}, {"name": "http", "port": 8}, {"name": "api", "port": 7}]);
    let unnamed = json!([{"name": "", "port": 5}, {"name": "dns", "port": 53, "protocol": "UDP"}]);
    for (ports, choice, expected) in [
        (&several, PortChoice::Only, Some(8)),
        (&several, named("api"), Some(7)),
        (&several, named("grpc"), None),
        (&several, number(6), Some(6)),
        (&unnamed, PortChoice::Only, Some(5)),
        (&unnamed, named("dns"), None),
        (&json!([{"name": "a", "port": 1}, {"name": "b", "port": 2}]), PortChoice::Only, None),
        (&json!([{"name": "http", "port": null}]), PortChoice::Only, None),
        (&json!([]), PortChoice::Only, None),
        (&json!([]), number(6), Some(6)),
    ] {
        let slices = with_ports(ports.clone());
        let expected: Vec<_> = expected.map(|port| format!("a http://10.0.0.1:{port}")).into_iter().collect();
        assert_eq!(told_with(&slices, &choice), expected, "{ports} {choice:?}");
        assert_eq!(slices.told(&kind(), &choice).without_port, 1 - expected.len());
    }
}

#[test]
fn events_change_what_was_listed() {
    let mut slices = slices(&[slice("one", "IPv4", &json!([pod("a", "10.0.0.1", &json!({}))]))]);
    let mut tell = |kind: &str, object: Value| {
        let line = json!({"type": kind, "object": object}).to_string();
        let event = slices.apply(line.as_bytes()).unwrap();
        (event, told_with(&slices, &PortChoice::Only))
    };
    let mut added = slice("two", "IPv4", &json!([pod("b", "10.0.0.2", &json!({}))]));
    added["metadata"]["resourceVersion"] = "8".into();
    let (event, told) = tell("ADDED", added.clone());
    assert!(matches!(event, Event::Changed(version) if version == "8"));
    assert_eq!(told, ["a http://10.0.0.1:8000", "b http://10.0.0.2:8000"]);
    added["endpoints"] = json!([]);
    assert_eq!(tell("MODIFIED", added).1, ["a http://10.0.0.1:8000"]);
    let bookmark = json!({"kind": "EndpointSlice", "metadata": {"resourceVersion": "9"}});
    assert!(matches!(tell("BOOKMARK", bookmark).0, Event::Bookmark(version) if version == "9"));
    let gone = json!({"kind": "Status", "code": 410, "message": "too old resource version"});
    assert!(
        matches!(tell("ERROR", gone).0, Event::Failed { code: 410, message } if message.contains("too old"))
    );
    assert!(matches!(tell("FUTURE", json!({})).0, Event::Unknown));
    assert!(tell("DELETED", slice("one", "IPv4", &json!(null))).1.is_empty());
}

#[test]
fn garbage_is_an_error_and_changes_nothing() {
    let mut slices = slices(&[slice("one", "IPv4", &json!([pod("a", "10.0.0.1", &json!({}))]))]);
    let wrong_version =
        r#"{"type": "DELETED", "object": {"metadata": {"name": "one", "resourceVersion": "a b"}}}"#;
    let wrong_type = r#"{"type": "ADDED", "object": {"metadata": {"name": "one"}, "endpoints": "many"}}"#;
    for line in [
        "",
        "{",
        "null",
        "[]",
        "{}",
        r#"{"type": "ADDED"}"#,
        r#"{"type": 5, "object": {}}"#,
        wrong_type,
        wrong_version,
    ] {
        assert!(slices.apply(line.as_bytes()).is_err(), "{line}");
    }
    for list in ["", "[]", "{}", r#"{"metadata": {}, "items": {}}"#, r#"{"metadata": {}, "items": [{}]}"#] {
        assert!(slices.replace(list.as_bytes()).is_err(), "{list}");
    }
    assert_eq!(told_with(&slices, &PortChoice::Only), ["a http://10.0.0.1:8000"]);
    // A port beyond 65535 is none that anything could listen on.
    let far = r#"{"metadata": {}, "items": [{"metadata": {}, "ports": [{"port": 70000}]}]}"#;
    assert!(slices.replace(far.as_bytes()).is_err());
}

#[test]
fn what_the_api_says_of_a_failure_is_told_in_part() {
    let long = json!({"kind": "Status", "code": 403, "message": "ä".repeat(1_000)}).to_string();
    let status = Status::read(long.as_bytes());
    assert_eq!((status.code, status.message.chars().count()), (403, Status::MOST_CHARACTERS));
    for other in ["", "<html>", "[]"] {
        assert_eq!(Status::read(other.as_bytes()).message, "");
    }
}
