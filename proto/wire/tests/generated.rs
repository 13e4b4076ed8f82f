//! The generated code in this crate is what the `.proto` files say; written anew with `REGENERATE=1`.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::path::Path;

#[test]
fn generated_code_is_fresh() {
    for (proto, package, committed) in [
        ("worker.proto", "roundhouse.worker.v1.rs", "src/v1.rs"),
        ("replica.proto", "roundhouse.replica.v1.rs", "src/replica.rs"),
        ("gateway.proto", "roundhouse.gateway.v1.rs", "src/gateway.rs"),
    ] {
        is_fresh(proto, package, committed);
    }
}

fn is_fresh(proto: &str, package: &str, committed: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let fresh = tempdir();
    let descriptors = protox::compile([proto], [root.parent().unwrap()]).unwrap();
    tonic_prost_build::configure()
        .build_transport(false)
        .bytes(".")
        .server_mod_attribute(".", "#[cfg(feature = \"server\")]")
        .client_mod_attribute(".", "#[cfg(feature = \"client\")]")
        .emit_rerun_if_changed(false)
        .out_dir(&fresh)
        .compile_fds(descriptors)
        .unwrap();
    let generated = std::fs::read_to_string(fresh.join(package)).unwrap();
    std::fs::remove_dir_all(&fresh).unwrap();
    let path = root.join(committed);
    if std::env::var_os("REGENERATE").is_some() {
        std::fs::write(&path, &generated).unwrap();
    }
    let known = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        known == generated,
        "proto/wire/{committed} is not what proto/{proto} says; run REGENERATE=1 cargo test -p roundhouse-wire"
    );
}

fn tempdir() -> std::path::PathBuf {
    let directory = std::env::temp_dir().join(format!("roundhouse-wire-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    directory
}
