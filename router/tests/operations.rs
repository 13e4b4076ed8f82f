//! What operators are given to look at names metrics that there are.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Names of ours behind any of these.
fn names<'a>(text: &'a str, begin: &'a str) -> impl Iterator<Item = &'a str> {
    text.match_indices(begin).map(move |(at, _)| {
        let name = &text[at + begin.len() - "router_".len()..];
        let end = name.find(|letter: char| !matches!(letter, 'a'..='z' | '0'..='9' | '_'));
        &name[..end.unwrap_or(name.len())]
    })
}

fn sources(folder: &Path, found: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else {
            found.push_str(&read(&path));
        }
    }
}

#[test]
fn dashboards_alerts_and_guides_name_metrics_that_there_are() {
    let root = root();
    let mut code = String::new();
    sources(&root.join("router/src"), &mut code);
    let known: BTreeSet<_> = names(&code, "\"router_").collect();
    let mut named = 0;
    for (file, begin) in [
        ("deploy/grafana.json", "router_"),
        ("deploy/alerts.yaml", "router_"),
        ("deploy/autoscaling.yaml", "router_"),
        ("deploy/README.md", "`router_"),
        ("README.md", "`router_"),
    ] {
        let text = read(&root.join(file));
        for name in names(&text, begin) {
            let whole = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
            assert!(
                known.contains(name) || whole.is_some_and(|whole| known.contains(whole)),
                "{file}: {name}"
            );
            named += 1;
        }
    }
    assert!(named > 60, "{named}");
}

#[test]
fn the_dashboard_is_one() {
    let dashboard: serde_json::Value =
        serde_json::from_str(&read(&root().join("deploy/grafana.json"))).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len());
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    assert!(targets.clone().count() > 20);
    for target in targets {
        let expression = target["expr"].as_str().unwrap();
        let depth = |open, close| expression.matches(open).count() == expression.matches(close).count();
        assert!(depth('(', ')') && depth('{', '}') && depth('[', ']'), "{expression}");
        assert!(expression.contains("$job"), "{expression}");
    }
}
