//! The worker as a process, on a machine.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use serde_json::{Value, json};

use crate::fake::FakeMachine;

/// No wait of a test is longer; reaching it is a failure.
const LIMIT: Duration = Duration::from_secs(120);

fn command(machine: &FakeMachine, arguments: &[&str]) -> Command {
    let built = || env!("CARGO_BIN_EXE_worker").into();
    let mut command = Command::new(std::env::var_os("ROUNDHOUSE_WORKER").unwrap_or_else(built));
    command.args(["--port", "0", "--threads", "1"]).args(arguments).env("NO_COLOR", "1");
    machine.enter(&mut command);
    command
}

/// What a worker says that does not start.
pub(crate) fn refusal(machine: &FakeMachine, arguments: &[&str]) -> String {
    let output = command(machine, arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    said
}

/// What a worker answers.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Completion {
    pub(crate) tokens: Vec<String>,
    /// Of the tokens.
    pub(crate) logprobs: Vec<f64>,
    /// At each place those of the most probable tokens, by token.
    pub(crate) top: Vec<Value>,
}

impl Completion {
    /// The difference of the log-probabilities, as this one has them, of its own token and the other's where they part first;
    /// infinite where they do not.
    pub(crate) fn parting(&self, other: &Self) -> f64 {
        let parted = self.tokens.iter().zip(&other.tokens).position(|(own, other)| own != other);
        parted.map_or(f64::INFINITY, |at| {
            let others = self.top[at][&other.tokens[at]].as_f64().unwrap_or(f64::NEG_INFINITY);
            self.logprobs[at] - others
        })
    }
}

/// A worker that serves until it is stopped or dropped.
pub(crate) struct Program {
    child: Child,
    /// Its first line: address, model, backend.
    described: String,
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Program {
    pub(crate) fn start(machine: &FakeMachine, arguments: &[&str]) -> Self {
        let mut child =
            command(machine, arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let (send, first_line) = mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            let _ = stdout.read_line(&mut line);
            let _ = send.send(line);
        });
        let mut program =
            Self { child, described: first_line.recv_timeout(LIMIT).expect("it starts in time") };
        if program.described.is_empty() {
            panic!("the worker does not start:\n{}", program.stop());
        }
        program
    }

    pub(crate) fn described(&self) -> &str {
        &self.described
    }

    /// The tokens that greedily follow a prompt.
    pub(crate) fn complete(&self, prompt: &str, max_tokens: usize) -> Vec<String> {
        self.complete_with(prompt, &json!({"max_tokens": max_tokens, "temperature": 0})).tokens
    }

    /// What follows a prompt, drawn as `parameters` say.
    pub(crate) fn complete_with(&self, prompt: &str, parameters: &Value) -> Completion {
        let mut body = json!({"prompt": prompt, "logprobs": 5});
        body.as_object_mut().unwrap().extend(parameters.as_object().unwrap().clone());
        let answer = self.post("/v1/completions", &body);
        let list = |name: &str| {
            let list = answer["choices"][0]["logprobs"][name].as_array();
            list.unwrap_or_else(|| panic!("no {name}: {answer}")).iter()
        };
        Completion {
            tokens: list("tokens").map(|token| token.as_str().unwrap().to_owned()).collect(),
            logprobs: list("token_logprobs").map(|logprob| logprob.as_f64().unwrap()).collect(),
            top: list("top_logprobs").cloned().collect(),
        }
    }

    /// What it says of its counters.
    pub(crate) fn info(&self) -> Value {
        self.call("GET", "/server_info", "")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Value {
        self.call("POST", path, &body.to_string())
    }

    fn call(&self, method: &str, path: &str, body: &str) -> Value {
        let (status, body) = self.exchange(method, path, body);
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"))
    }

    /// Status and body of the answer.
    pub(crate) fn exchange(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let address = self.described.split("http://").nth(1).unwrap().split(": ").next().unwrap();
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\nconnection: close\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        (status.unwrap_or_else(|| panic!("no status: {answer}")), body.to_owned())
    }

    /// Ends it; returns what it wrote to stderr.
    pub(crate) fn stop(&mut self) -> String {
        let _ = self.child.kill();
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        said
    }
}
