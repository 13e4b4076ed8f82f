//! Whole configurations.

use router_core::policy;

use super::*;

fn configure(arguments: &[&str]) -> Result<Config, ConfigErrors> {
    let arguments: Vec<_> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    Cli::configure(&arguments, None)
}

#[cfg(feature = "embedded")]
#[test]
fn defaults_are_two_embedded_workers_and_listeners_on_loopback() {
    let config = configure(&[]).unwrap();
    assert_eq!(config.settings.listen().to_string(), "127.0.0.1:30000");
    assert_eq!(config.admin_listen.unwrap().to_string(), "127.0.0.1:30001");
    let addresses: Vec<_> = config.workers.iter().map(|worker| worker.address.as_str()).collect();
    assert_eq!(addresses, ["embedded:builtin", "embedded:builtin"]);
}

#[test]
fn the_flag_of_the_card_works() {
    let config = configure(&["--workers", "w1,w2"]).unwrap();
    let workers: Vec<_> = config.workers.iter().map(|w| (w.id.as_str(), w.address.as_str())).collect();
    assert_eq!(workers, [("w0", "http://w1:8000"), ("w1", "http://w2:8000")]);
}

#[test]
fn everything_wrong_is_said_at_once() {
    let ConfigErrors(errors) = configure(&[
        "--policy",
        "fastest",
        "--workers",
        "ftp://a,b:c",
        "--threads",
        "0",
        "--admin-listen",
        "0.0.0.0:9000",
        "--metrics-listen",
        "127.0.0.1:30000",
    ])
    .unwrap_err();
    assert_eq!(errors.len(), 6, "{errors:#?}");
    assert!(errors[0].contains("prefix_aware") && errors[0].contains("consistent_hash"));
}

#[test]
fn flags_win_over_the_file() {
    let path = std::env::temp_dir().join(format!("router-config-test-{}.yaml", std::process::id()));
    std::fs::write(&path, "port: 4000\npolicy: random\nworkers: [a]\n").unwrap();
    let config = Cli::configure(&["--port".to_owned(), "5000".to_owned()], Some(&path)).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(config.settings.port, 5000);
    assert_eq!(config.settings.policy, "random");
    assert_eq!(config.admin_listen.unwrap().port(), 5001);
}

#[test]
fn a_files_wrong_keys_and_wrong_values_come_at_once() {
    let path = std::env::temp_dir().join(format!("router-config-errors-{}.yaml", std::process::id()));
    std::fs::write(&path, "prot: 4000\npolicy: fastest\nworkers: [a, 'ftp://b']\n").unwrap();
    let ConfigErrors(errors) = Cli::configure(&[], Some(&path)).unwrap_err();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(errors.len(), 3, "{errors:?}");
    for (error, expected) in errors.iter().zip(["prot", "fastest", "ftp"]) {
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_file_may_name_sources_of_workers() {
    let path = std::env::temp_dir().join(format!("router-config-sources-{}.yaml", std::process::id()));
    let configure = |text: &str| {
        std::fs::write(&path, text).unwrap();
        Cli::configure(&[], Some(&path))
    };
    let config =
        configure("workers: [k8s://ml/decode, a]\nprefill: ['k8s://ml/prefill?bootstrap_port=7']\n").unwrap();
    assert_eq!((config.workers.len(), config.sources.len(), config.kubernetes_api), (1, 2, None));
    let wrong = "workers: [k8s://ml/A, dns+ftp://b]\nkubernetes-api: ftp://c\n";
    let ConfigErrors(errors) = configure(wrong).unwrap_err();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(errors.len(), 3, "{errors:?}");
    for (error, expected) in errors.iter().zip(["names no Service", "+grpc", "https://host:port"]) {
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_file_may_say_how_many_ranks_a_worker_has() {
    let path = std::env::temp_dir().join(format!("router-config-ranks-{}.yaml", std::process::id()));
    std::fs::write(&path, "workers: ['a=http://a:1?dp=2&dp_by=routed_dp_rank', 'k8s://b?dp=4']\n").unwrap();
    let config = Cli::configure(&[], Some(&path)).unwrap();
    std::fs::remove_file(&path).unwrap();
    let ids: Vec<_> = config.workers.iter().map(|spec| spec.id.as_str()).collect();
    assert_eq!((ids, config.sources.len()), (vec!["a-dp0", "a-dp1"], 1));
}

#[test]
fn limits_are_checked_at_start() {
    let ConfigErrors(errors) = configure(&[
        "--workers=a",
        "--model-timeouts",
        "m idle=5s,n soon=1s",
        "--probe-interval-down=2s",
        "--probe-path=health",
    ])
    .unwrap_err();
    assert_eq!(errors.len(), 3, "{errors:?}");
    for (error, expected) in errors.iter().zip(["first-byte, idle and total", "500ms", "/health"]) {
        assert!(error.contains(expected), "{error}");
    }
    let config = configure(&["--workers=a", "--model-timeouts=m idle=5s,n total=1s"]).unwrap();
    let models: Vec<_> = config.model_timeouts.iter().map(|limits| limits.model.as_str()).collect();
    assert_eq!(models, ["m", "n"]);
    for bad in ["--retry-budget=5", "--first-byte-timeout=soon", "--slow-start=0"] {
        assert!(configure(&["--workers=a", bad]).is_err(), "{bad}");
    }
}

#[test]
fn traces_go_where_http_is_spoken() {
    let ConfigErrors(errors) =
        configure(&["--workers=a", "--otlp-traces-endpoint=http://otel:4317", "--otlp-traces-share=200%"])
            .unwrap_err();
    assert_eq!(errors.len(), 2, "{errors:?}");
    for (error, expected) in errors.iter().zip(["otlp-traces-endpoint: ", "from 0% to 100%"]) {
        assert!(error.contains(expected), "{error}");
    }
    let given = ["--workers=a", "--otlp-traces-endpoint=https://otel", "--otlp-traces-share=5%"];
    assert!(configure(&given).unwrap().otlp_traces.is_some());
}

#[test]
fn lists_of_the_file_are_lists() {
    let path = std::env::temp_dir().join(format!("router-config-lists-{}.yaml", std::process::id()));
    let text =
        "workers: [a]\nfirst-byte-timeout: off\nmodel_timeouts:\n- m first-byte=30s\n- n idle=1m total=2m\n";
    std::fs::write(&path, text).unwrap();
    let config = Cli::configure(&[], Some(&path)).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(config.settings.first_byte_timeout, TimeLimit::Off);
    assert_eq!(config.model_timeouts.len(), 2);
    assert_eq!(config.model_timeouts[1].total, Some(Duration::from_secs(120)));
}

#[test]
fn the_admin_listener_can_be_off() {
    assert_eq!(configure(&["--workers=a", "--admin-listen", "off"]).unwrap().admin_listen, None);
    assert!(configure(&["--workers=a", "--port", "65535"]).is_err());
    assert!(configure(&["--workers=a", "--port", "65535", "--admin-listen", "off"]).is_ok());
}

#[test]
fn a_log_level_is_about_the_router_and_a_filter_about_what_it_names() {
    let filter =
        |level: &str| configure(&["--workers=a", "--log-level", level]).map(|c| c.settings.log_filter());
    let trace = filter("trace").unwrap();
    assert!(trace.starts_with("warn,router=trace,router_core=trace"), "{trace}");
    assert!(filter("error").unwrap().starts_with("error,router=error"));
    assert_eq!(filter("router=debug,h2=trace").unwrap(), "router=debug,h2=trace");
    for wrong in ["verbose", "inof", "", "router=loud"] {
        assert!(filter(wrong).unwrap_err().0[0].contains("error, warn, info"), "{wrong}");
    }
}

#[test]
fn help_names_every_policy() {
    let help = <Cli as clap::CommandFactory>::command().render_long_help().to_string();
    for (name, _) in policy::policies() {
        assert!(help.contains(name), "{name}");
    }
}

#[test]
fn certificate_and_key_come_together() {
    for one in ["--tls-cert=a.pem", "--tls-key=a.pem"] {
        let ConfigErrors(errors) = configure(&["--workers=a", one]).unwrap_err();
        assert!(errors.len() == 1 && errors[0].contains("beside it"), "{errors:?}");
    }
    assert!(configure(&["--workers=a", "--tls-cert=a.pem", "--tls-key=b.pem"]).is_ok());
}
