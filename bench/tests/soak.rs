//! `bench soak`, with mock workers in place of the router, so that nothing it counts depends on a router.

use std::net::TcpListener;
use std::process::Command;

use serde_json::Value;

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port").port()
}

#[test]
fn counts_every_request_and_every_kill() {
    let bench = env!("CARGO_BIN_EXE_bench");
    let [router, one, two] = [free_port(), free_port(), free_port()];
    let lines = std::env::temp_dir().join(format!("bench-soak-{}-{router}", std::process::id()));
    let in_place_of_a_router =
        format!("{bench} overhead --mocks-only --waiting sleep --core any --mock-ports {router}");
    let output = Command::new(bench)
        .args(["soak", "--core", "any", "--router-core", "any", "--rate", "100", "--duration", "3"])
        .args(["--kill-every", "1", "--down", "0", "--read-every", "1"])
        .args(["--address", &format!("127.0.0.1:{router}"), "--mock-ports", &format!("{one},{two}")])
        .args(["--command", &in_place_of_a_router, "--output-file"])
        .arg(&lines)
        .output()
        .expect("bench runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let line = std::fs::read_to_string(&lines).expect("a line was written");
    std::fs::remove_file(&lines).expect("it can be removed");
    let report: Value = serde_json::from_str(line.trim()).expect("it is JSON");
    let answered = report["answered"].as_u64().expect("a count");
    assert_eq!(report["failures"], serde_json::json!({}));
    assert_eq!(answered, 300, "100 a second for 3 s");
    assert_eq!(report["kills"], 3);
    let readings = report["readings"].as_array().expect("readings");
    assert!(readings.len() >= 2 && readings.iter().all(|reading| reading["rss_mb"].as_f64() > Some(0.0)));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains(&format!("{answered} answered")), "{text}");
}
