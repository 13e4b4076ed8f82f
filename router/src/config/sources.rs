//! What an operator writes for a source of workers, and what it means.

use std::net::IpAddr;

use router_core::Role;

use super::options::Options;
use super::workers::{split_id, usual_port};
use crate::config::is_worker_id;
use crate::discovery::source::{Kind, Place, PortChoice, SourceSpec};

/// The forms that there are.
const FORMS: &str =
    "k8s://[NAMESPACE/]SERVICE[:PORT] or dns://NAME[:PORT], with +https, +h2c or +grpc behind k8s or dns";
/// What workers of a source may speak, over the network alone.
const SCHEMES: [&str; 4] = ["http", "https", "h2c", "grpc"];

/// Whether what is written for a worker names a source of workers in place of one.
pub(super) fn names_source(text: &str) -> bool {
    let scheme = split_id(text).1.split_once("://").map(|(scheme, _)| scheme);
    scheme.is_some_and(|scheme| ["k8s", "dns"].contains(&scheme.split('+').next().unwrap_or_default()))
}

/// Reads a source of workers with this role: `[PREFIX=]k8s[+SCHEME]://[NAMESPACE/]SERVICE[:PORT]` or `[PREFIX=]dns[+SCHEME]://NAME[:PORT]`, with
/// the options of a worker behind it.
///
/// # Errors
/// What is wrong, and what would be right.
pub(super) fn parse_source(text: &str, role: Role) -> Result<SourceSpec, String> {
    let (text, options) = Options::split(text, role)?;
    let (prefix, url) = split_id(text);
    let wrong = |why: &str| format!("{url:?} {why}; write {FORMS}");
    if let Some(prefix) = prefix.filter(|prefix| !is_worker_id(prefix)) {
        return Err(format!("{prefix:?} begins no id; take up to 64 letters, digits, '-', '_' and '.'"));
    }
    let (kind, place) = url.split_once("://").ok_or_else(|| wrong("is no source of workers"))?;
    let (kind, scheme) = kind.split_once('+').unwrap_or((kind, "http"));
    let scheme = SCHEMES.into_iter().find(|known| *known == scheme);
    let scheme = scheme.ok_or_else(|| wrong("has an unknown scheme"))?;
    options.check_scheme(scheme, url)?;
    let place = match kind {
        "k8s" => parse_kubernetes(place).map_err(wrong)?,
        _ => parse_dns(place, scheme).map_err(wrong)?,
    };
    let Options { bootstrap_port, dp_ranks } = options;
    let workers = Kind { scheme, prefix: prefix.map(str::to_owned), role, bootstrap_port, dp_ranks };
    Ok(SourceSpec { name: url.into(), place, workers })
}

fn parse_kubernetes(text: &str) -> Result<Place, &'static str> {
    let (namespace, rest) = match text.split_once('/') {
        Some((namespace, rest)) => (Some(namespace), rest),
        None => (None, text),
    };
    let (service, port) = match rest.split_once(':') {
        Some((service, port)) => (service, Some(port)),
        None => (rest, None),
    };
    if !is_label(service) {
        return Err("names no Service");
    }
    if namespace.is_some_and(|namespace| !is_label(namespace)) {
        return Err("names no namespace before '/'");
    }
    let port = match port {
        None => PortChoice::Only,
        Some(port) => match port.parse::<u16>() {
            Ok(number) if number != 0 => PortChoice::Number(number),
            // A name has a letter, so that nobody takes it for a number.
            _ if is_label(port) && port.bytes().any(|byte| byte.is_ascii_lowercase()) => {
                PortChoice::Named(port.to_owned())
            }
            _ => return Err("has no valid port"),
        },
    };
    Ok(Place::Kubernetes { namespace: namespace.map(str::to_owned), service: service.to_owned(), port })
}

/// Whether Kubernetes would take it for the name of a Service, a namespace or a port.
fn is_label(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&text.len())
        && text.bytes().all(is_plain)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

fn parse_dns(text: &str, scheme: &str) -> Result<Place, &'static str> {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) => (host, port.parse().ok().filter(|port| *port != 0)),
        // As of a bare host, which is an engine's.
        None => (text, Some(usual_port(if scheme == "http" { "" } else { scheme }))),
    };
    if text.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
        || host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
    {
        return Err("has an address in place of a name: that is a worker, without dns:// in front");
    }
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if !(1..=253).contains(&host.len()) || !host.bytes().all(is_plain) {
        return Err("has no name");
    }
    Ok(Place::Dns { host: host.to_owned(), port: port.ok_or("has no valid port")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(text: &str) -> Place {
        parse_source(text, Role::Generate).unwrap().place
    }

    fn kubernetes(namespace: Option<&str>, service: &str, port: PortChoice) -> Place {
        Place::Kubernetes { namespace: namespace.map(str::to_owned), service: service.to_owned(), port }
    }

    #[test]
    fn services_of_kubernetes() {
        assert_eq!(place("k8s://workers"), kubernetes(None, "workers", PortChoice::Only));
        assert_eq!(place("k8s://ml/workers"), kubernetes(Some("ml"), "workers", PortChoice::Only));
        let named = PortChoice::Named("http".to_owned());
        assert_eq!(place("k8s://ml/workers:http"), kubernetes(Some("ml"), "workers", named));
        assert_eq!(place("k8s://workers:8000"), kubernetes(None, "workers", PortChoice::Number(8_000)));
    }

    #[test]
    fn names_with_many_addresses() {
        let dns = |host: &str, port| Place::Dns { host: host.to_owned(), port };
        assert_eq!(place("dns://workers.ml.svc"), dns("workers.ml.svc", 8_000));
        assert_eq!(place("dns://workers:9000"), dns("workers", 9_000));
        assert_eq!(place("dns+grpc://workers"), dns("workers", 8_001));
    }

    #[test]
    fn what_workers_of_a_source_are() {
        let source = parse_source("a=k8s+grpc://workers", Role::Generate).unwrap();
        assert_eq!((&*source.name, source.workers.scheme), ("k8s+grpc://workers", "grpc"));
        assert_eq!(source.workers.prefix.as_deref(), Some("a"));
        let source = parse_source("k8s://workers?bootstrap_port=7000", Role::Prefill).unwrap();
        assert_eq!((&*source.name, source.workers.bootstrap_port), ("k8s://workers", Some(7_000)));
        let source = parse_source("a=dns://workers:9?dp=8", Role::Generate).unwrap();
        assert_eq!((&*source.name, source.workers.prefix.as_deref()), ("dns://workers:9", Some("a")));
        assert_eq!(source.workers.dp_ranks.map(|ranks| ranks.count), Some(8));
    }

    #[test]
    fn a_source_is_told_from_a_worker() {
        for source in ["k8s://a", " a=dns://b:1", "k8s+grpc://a", "k8s+ftp://a", "k8s://a?bootstrap_port=1"] {
            assert!(names_source(source), "{source}");
        }
        for worker in ["k8s", "dns:8000", "http://k8s", "a=http://b:1", "embedded:dns", "ftp://a"] {
            assert!(!names_source(worker), "{worker}");
        }
    }

    #[test]
    fn errors_say_what_would_be_right() {
        for (text, expected) in [
            ("k8s://", "names no Service"),
            ("k8s:///a", "names no namespace"),
            ("k8s://a/b/c", "names no Service"),
            ("k8s://A", "names no Service"),
            ("k8s://a:0", "valid port"),
            ("k8s://a:", "valid port"),
            ("k8s://a:70000", "valid port"),
            ("k8s+ftp://a", "+https, +h2c or +grpc"),
            ("k8s://a?bootstrap_port=1", "more than host and port"),
            ("k8s+grpc://a?dp=2", "engines over HTTP"),
            ("a b=k8s://a", "begins no id"),
            ("dns://10.0.0.1:80", "that is a worker"),
            ("dns://[::1]", "that is a worker"),
            ("dns://[::1]:80", "that is a worker"),
            ("dns://a:0", "valid port"),
            ("dns://", "no name"),
            ("dns://:80", "no name"),
            ("dns://a/b", "no name"),
            ("dns://a b", "dns://NAME[:PORT]"),
        ] {
            let error = parse_source(text, Role::Generate).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
        let error = parse_source("k8s://a?bootstrap_port=x", Role::Prefill).unwrap_err();
        assert!(error.contains("8998"), "{error}");
    }
}
