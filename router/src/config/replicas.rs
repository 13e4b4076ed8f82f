//! What an operator writes for the routers beside this one.

use router_core::Role;

use super::Settings;
use super::sources::{names_source, parse_source};
use crate::discovery::source::{Kind, SourceSpec};

/// Where other routers are.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct NamedReplicas {
    /// `host:port` each.
    pub(super) addresses: Vec<String>,
    pub(super) sources: Vec<SourceSpec>,
}

/// Reads `--replicas`; what is wrong with it, or missing beside it, goes to `errors`.
pub(super) fn parse_replicas(settings: &Settings, errors: &mut Vec<String>) -> NamedReplicas {
    let mut named = NamedReplicas::default();
    let given = settings.replicas.iter().map(|text| text.trim()).filter(|text| !text.is_empty());
    for text in given {
        let parsed = if names_source(text) { parse_found(text) } else { Err(None) };
        match parsed {
            Ok(source) if named.sources.iter().any(|known| known.name == source.name) => {
                errors.push(format!("replicas: {text} is there twice"));
            }
            Ok(source) => named.sources.push(source),
            Err(Some(error)) => errors.push(format!("replicas: {error}")),
            Err(None) if is_address(text) => {
                if !named.addresses.iter().any(|known| known == text) {
                    named.addresses.push(text.to_owned());
                }
            }
            Err(None) => errors.push(format!(
                "replicas: {text:?} is no router's address; write host:port, dns://NAME:PORT or k8s://[NAMESPACE/]SERVICE:PORT"
            )),
        }
    }
    let are_named = !named.addresses.is_empty() || !named.sources.is_empty();
    match settings.replica_listen {
        None if are_named => {
            errors.push("replicas: needs replica-listen beside it, where the others tell this one".to_owned());
        }
        Some(_) if settings.replicas.is_empty() => {
            errors.push("replica-listen: needs replicas beside it, the others that tell this one".to_owned());
        }
        Some(_) if settings.prefix_seed_file.is_none() => errors.push(
            "replicas: needs prefix-seed-file beside it, the same for all: by it they know each other, and each other's prompts".to_owned(),
        ),
        _ => {}
    }
    named
}

fn parse_found(text: &str) -> Result<SourceSpec, Option<String>> {
    let source = parse_source(text, Role::Generate).map_err(Some)?;
    let place = text.split_once("://").map_or("", |(_, place)| place);
    let Kind { scheme, prefix, dp_ranks, .. } = &source.workers;
    if *scheme != "http" || prefix.is_some() || dp_ranks.is_some() || !place.contains(':') {
        return Err(Some(format!(
            "{text:?} does not say where routers listen; write dns://NAME:PORT or k8s://[NAMESPACE/]SERVICE:PORT"
        )));
    }
    Ok(source)
}

fn is_address(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let is_host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(ip) => ip.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.bytes().all(is_plain),
    };
    is_host && port.parse::<u16>().is_ok_and(|port| port != 0)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::config::Cli;

    fn parse(arguments: &[&str]) -> (NamedReplicas, Vec<String>) {
        let all = ["router", "--prefix-seed-file=/dev/null"].iter().chain(arguments);
        let mut errors = Vec::new();
        let named = parse_replicas(&Cli::parse_from(all).settings, &mut errors);
        (named, errors)
    }

    const LISTEN: &str = "--replica-listen=127.0.0.1:7000";

    #[test]
    fn routers_are_named_or_found() {
        let list = "--replicas=r0:7000,10.0.0.1:7000,[fd00::1]:7000,dns://routers.ml.svc:7000,k8s://ml/routers:replicas, r0:7000";
        let (named, errors) = parse(&[LISTEN, list]);
        assert_eq!(errors, [""; 0]);
        assert_eq!(named.addresses, ["r0:7000", "10.0.0.1:7000", "[fd00::1]:7000"]);
        let names: Vec<_> = named.sources.iter().map(|source| &*source.name).collect();
        assert_eq!(names, ["dns://routers.ml.svc:7000", "k8s://ml/routers:replicas"]);
        assert_eq!(parse(&[]), (NamedReplicas::default(), Vec::new()), "one alone needs nothing");
    }

    #[test]
    fn errors_say_what_would_be_right() {
        for (arguments, expected) in [
            (&[LISTEN, "--replicas=r0"][..], "write host:port"),
            (&[LISTEN, "--replicas=http://r0:7000"], "write host:port"),
            (&[LISTEN, "--replicas=r0:0"], "write host:port"),
            (&[LISTEN, "--replicas=[r0]:7000"], "write host:port"),
            (&[LISTEN, "--replicas=dns://routers"], "dns://NAME:PORT"),
            (&[LISTEN, "--replicas=k8s+grpc://routers:7000"], "dns://NAME:PORT"),
            (&[LISTEN, "--replicas=a=k8s://routers:7000"], "dns://NAME:PORT"),
            (&[LISTEN, "--replicas=k8s://routers:7000?dp=2"], "dns://NAME:PORT"),
            (&[LISTEN, "--replicas=k8s://routers:7000,k8s://routers:7000"], "twice"),
            (&["--replicas=r0:7000"], "needs replica-listen"),
            (&[LISTEN], "needs replicas"),
        ] {
            let (_, errors) = parse(arguments);
            assert!(errors.len() == 1 && errors[0].contains(expected), "{arguments:?}: {errors:?}");
        }
        let mut errors = Vec::new();
        parse_replicas(&Cli::parse_from(["router", LISTEN, "--replicas=r0:7000"]).settings, &mut errors);
        assert!(errors.len() == 1 && errors[0].contains("needs prefix-seed-file"), "{errors:?}");
    }
}
