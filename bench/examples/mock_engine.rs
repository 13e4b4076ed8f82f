//! An engine that answers at once: for measuring what the benchmark's own client can do.
//!
//! `cargo run --release -p bench --example mock_engine -- 9000 3` listens on 127.0.0.1:9000 and streams 3 chunks to
//! every completion, on one thread.

use std::convert::Infallible;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

const MODELS: &str = r#"{"object":"list","data":[{"id":"mock","object":"model"}]}"#;

/// A whole answer: a chunk a token, usage, `[DONE]`.
fn stream(tokens: usize) -> String {
    let chunk = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"}}]}\n\n".repeat(tokens);
    let usage = format!(r#"{{"prompt_tokens":8,"completion_tokens":{tokens}}}"#);
    format!("{chunk}data: {{\"choices\":[],\"usage\":{usage}}}\n\ndata: [DONE]\n\n")
}

async fn answer(request: Request<Incoming>, streamed: Bytes) -> Result<Response<Full<Bytes>>, Infallible> {
    if request.uri().path() == "/v1/models" {
        return Ok(Response::new(Full::from(MODELS)));
    }
    let _ = request.into_body().collect().await; // a body that breaks off ends its connection anyway
    Ok(Response::new(Full::new(streamed)))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let mut words = std::env::args().skip(1);
    let port: u16 = words.next().unwrap_or("9000".to_owned()).parse()?;
    let tokens: usize = words.next().unwrap_or("3".to_owned()).parse()?;
    let streamed = Bytes::from(stream(tokens));
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    loop {
        let (connection, _) = listener.accept().await?;
        connection.set_nodelay(true)?;
        let streamed = streamed.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request| answer(request, streamed.clone()));
            let server = hyper::server::conn::http1::Builder::new();
            let _ = server.serve_connection(TokioIo::new(connection), service).await;
        });
    }
}
