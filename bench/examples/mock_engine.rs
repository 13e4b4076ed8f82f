//! An engine that computes nothing: for measuring what the benchmark's own client can do.
//!
//! `cargo run --release -p bench --example mock_engine -- 9000 3` listens on 127.0.0.1:9000 and streams 3 chunks to every
//! completion, on one thread, at once. With a third word, `9000 600 100`, a chunk comes every 100 ms, the first after
//! 100 ms.

use std::time::Duration;

use bench::overhead::machine::raise_open_files;
use bench::wire::message::{MessageReader, Side};
use bench::wire::socket::{read_message, set_options};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};

const MODELS: &str = r#"{"object":"list","data":[{"id":"mock","object":"model"}]}"#;
const CHUNK: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"}}]}\n\n";

/// Thousands of clients may knock at once: a longer line than tokio's own 1,024.
const BACKLOG: u32 = 16_384;

/// What a generation request gets.
struct Answer {
    head: Vec<u8>,
    chunk: Vec<u8>,
    end: Vec<u8>,
    /// Head, all chunks and end in one.
    whole: Vec<u8>,
    models: Vec<u8>,
    chunks: usize,
    interval: Option<Duration>,
}

impl Answer {
    fn new(chunks: usize, interval: Option<Duration>) -> Self {
        let http_chunk = |data: &str| format!("{:x}\r\n{data}\r\n", data.len()).into_bytes();
        let usage = format!(
            "data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":8,\"completion_tokens\":{chunks}}}}}\n\ndata: [DONE]\n\n"
        );
        let head =
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                .to_vec();
        let (chunk, end) = (http_chunk(CHUNK), [http_chunk(&usage), b"0\r\n\r\n".to_vec()].concat());
        let whole = [head.clone(), chunk.repeat(chunks), end.clone()].concat();
        let models =
            format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{MODELS}", MODELS.len()).into_bytes();
        Self { head, chunk, end, whole, models, chunks, interval }
    }

    async fn write(&self, stream: &mut TcpStream) -> std::io::Result<()> {
        let Some(interval) = self.interval else { return stream.write_all(&self.whole).await };
        stream.write_all(&self.head).await?;
        let mut clock = tokio::time::interval(interval);
        clock.tick().await; // the first is over at once
        for _ in 0..self.chunks {
            clock.tick().await;
            stream.write_all(&self.chunk).await?;
        }
        stream.write_all(&self.end).await
    }
}

async fn serve(mut stream: TcpStream, answer: &Answer) -> anyhow::Result<()> {
    set_options(&stream)?;
    let mut reader = MessageReader::new(Side::Request);
    loop {
        read_message(&mut stream, &mut reader, |_, _| {}).await?;
        match reader.start_line().path() {
            b"/v1/models" => stream.write_all(&answer.models).await?,
            _ => answer.write(&mut stream).await?,
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let mut words = std::env::args().skip(1);
    let port: u16 = words.next().unwrap_or("9000".to_owned()).parse()?;
    let chunks: usize = words.next().unwrap_or("3".to_owned()).parse()?;
    let interval = words.next().map(|word| word.parse().map(Duration::from_millis)).transpose()?;
    raise_open_files();
    let answer: &'static Answer = Box::leak(Box::new(Answer::new(chunks, interval)));
    let listener = listen(port)?;
    loop {
        let (stream, _) = listener.accept().await?;
        tokio::spawn(serve(stream, answer)); // ends with its connection
    }
}

fn listen(port: u16) -> std::io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(([127, 0, 0, 1], port).into())?;
    socket.listen(BACKLOG)
}
