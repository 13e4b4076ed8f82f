//! The generated code in this crate is what `proto/worker.proto` says; written anew with `REGENERATE=1`.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::path::Path;

#[test]
fn generated_code_is_fresh() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let committed = root.join("src/v1.rs");
    let fresh = tempdir();
    let descriptors = protox::compile(["worker.proto"], [root.parent().unwrap()]).unwrap();
    tonic_prost_build::configure()
        .build_transport(false)
        .bytes(".")
        .server_mod_attribute(".", "#[cfg(feature = \"server\")]")
        .client_mod_attribute(".", "#[cfg(feature = \"client\")]")
        .emit_rerun_if_changed(false)
        .out_dir(&fresh)
        .compile_fds(descriptors)
        .unwrap();
    let generated = std::fs::read_to_string(fresh.join("roundhouse.worker.v1.rs")).unwrap();
    std::fs::remove_dir_all(&fresh).unwrap();
    if std::env::var_os("REGENERATE").is_some() {
        std::fs::write(&committed, &generated).unwrap();
    }
    let known = std::fs::read_to_string(&committed).unwrap();
    assert!(
        known == generated,
        "proto/wire/src/v1.rs is not what proto/worker.proto says; run REGENERATE=1 cargo test -p roundhouse-wire"
    );
}

fn tempdir() -> std::path::PathBuf {
    let directory = std::env::temp_dir().join(format!("roundhouse-wire-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    directory
}
