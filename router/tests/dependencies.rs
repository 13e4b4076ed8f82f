//! Holds the dependency rule of ARCHITECTURE.md: which of our crates may know which.

use std::collections::BTreeSet;
use std::path::Path;

/// `(manifest's folder, crates of ours it may depend on)`.
const RULE: &[(&str, &[&str])] = &[
    ("proto/types", &[]),
    ("proto/text", &["roundhouse-types"]),
    ("proto/wire", &["roundhouse-types"]),
    ("proto/zmtp", &[]),
    ("router/core", &["roundhouse-types"]),
    ("router", &["roundhouse-types", "roundhouse-wire", "roundhouse-zmtp", "router-core", "worker"]),
    ("worker/core", &["roundhouse-types"]),
    ("worker/kernels", &[]),
    (
        "worker",
        &[
            "roundhouse-types",
            "roundhouse-text",
            "roundhouse-wire",
            "roundhouse-zmtp",
            "worker-core",
            "worker-kernels",
        ],
    ),
    ("bench", &["roundhouse-types", "roundhouse-text", "router-core", "worker-core"]),
];

/// What a core crate must do without.
const IMPURE: &[&str] = &["tokio", "hyper", "http", "prometheus", "tracing", "cudarc", "tonic"];

fn dependencies(folder: &str) -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
    let path = root.join(folder).join("Cargo.toml");
    let manifest =
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut inside = false;
    let mut found = BTreeSet::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            inside = line == "[dependencies]";
        } else if let (true, Some((name, _))) = (inside, line.split_once(['.', ' ', '='])) {
            found.insert(name.to_owned());
        }
    }
    found
}

#[test]
fn crates_know_only_whom_they_may() {
    let ours: BTreeSet<&str> =
        RULE.iter().flat_map(|(_, allowed)| allowed.iter().copied()).chain(["bench", "router"]).collect();
    for (folder, allowed) in RULE {
        let known = dependencies(folder);
        let known: Vec<_> = known.iter().map(String::as_str).filter(|name| ours.contains(name)).collect();
        assert!(known.iter().all(|name| allowed.contains(name)), "{folder} depends on {known:?}");
    }
}

#[test]
fn core_crates_are_pure() {
    for folder in ["proto/types", "proto/text", "router/core", "worker/core"] {
        let impure: Vec<_> =
            dependencies(folder).into_iter().filter(|name| IMPURE.contains(&name.as_str())).collect();
        assert!(impure.is_empty(), "{folder} depends on {impure:?}");
    }
}

#[test]
fn the_router_needs_the_worker_for_the_embedded_transport_only() {
    let root = env!("CARGO_MANIFEST_DIR");
    let manifest = std::fs::read_to_string(Path::new(root).join("Cargo.toml")).unwrap_or_default();
    assert!(manifest.contains("worker = { workspace = true, optional = true }"));
    assert!(manifest.contains("embedded = [\"dep:worker\"]"));
}
