//! GETs from the Kubernetes API: where it is, who the router is there, and one connection for each request.
//!
//! A new connection each time: there is one for each list and one for each watch, and token and certificate authority, which Kubernetes
//! replaces as time goes on, are read anew with it. Knows nothing of what is asked for.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::slices::Status;
use crate::discovery::DiscoveryError;
use crate::liveness;
use crate::transport::{read_certificates, trusting_only};

/// Where Kubernetes puts what a pod needs to ask its API.
pub const CREDENTIALS: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Time for an answer to begin. A list of slices takes milliseconds.
const HEAD_LIMIT: Duration = Duration::from_secs(15);
/// Most of the answer to a failure that is read.
const MOST_STATUS_BYTES: usize = 64 << 10;
const USER_AGENT: &str = concat!("roundhouse-router/", env!("CARGO_PKG_VERSION"));

/// Where the API is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ApiAddress {
    security: Security,
    /// Without brackets.
    host: String,
    port: u16,
}

/// Whether the API's certificate is looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Security {
    /// And the router shows its token.
    Tls,
    /// Nothing secret is sent: for `kubectl proxy` and its like.
    Plain,
}

impl ApiAddress {
    /// Reads `https://host[:port]` or `http://host[:port]`.
    ///
    /// # Errors
    /// What would be right.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is no address of an API; write https://host:port, or http://host:port");
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        let (security, usual) = match uri.scheme_str() {
            Some("https") => (Security::Tls, 443),
            Some("http") => (Security::Plain, 80),
            _ => return Err(wrong()),
        };
        let authority =
            uri.authority().filter(|authority| !authority.as_str().contains('@')).ok_or_else(wrong)?;
        let host = authority.host().trim_matches(['[', ']']);
        let port = if authority.as_str() == authority.host() { Some(usual) } else { authority.port_u16() };
        let port = port.filter(|port| *port != 0).ok_or_else(wrong)?;
        if host.is_empty() || !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(wrong());
        }
        Ok(Self { security, host: host.to_owned(), port })
    }

    /// Where it is for the pod that this process runs in.
    ///
    /// # Errors
    /// When it runs in none.
    pub fn of_pod() -> Result<Self, String> {
        let said = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let (host, port) = (said("KUBERNETES_SERVICE_HOST"), said("KUBERNETES_SERVICE_PORT"));
        match (host, port) {
            // IPv6 comes without brackets.
            (Some(host), Some(port)) if host.contains(':') => Self::parse(&format!("https://[{host}]:{port}")),
            (Some(host), Some(port)) => Self::parse(&format!("https://{host}:{port}")),
            _ => Err("this process runs in no pod, since KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set; \
                      --kubernetes-api says where the API is"
                .to_owned()),
        }
    }

    /// `host:port` as requests name it.
    fn authority(&self) -> String {
        match self.host.parse::<IpAddr>() {
            Ok(IpAddr::V6(ip)) => format!("[{ip}]:{}", self.port),
            _ => format!("{}:{}", self.host, self.port),
        }
    }
}

/// The way to the API.
#[derive(Clone, Debug)]
pub struct Api {
    /// Where it is.
    pub address: ApiAddress,
    /// The directory of `token` and `ca.crt`.
    pub credentials: PathBuf,
    /// Time for a connection to be made.
    pub connect_timeout: Duration,
}

/// An answer that has begun. Dropping it closes the connection.
pub(super) struct Answer {
    body: Incoming,
    _connection: Connection,
}

struct Connection(AbortHandle);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What the router shows to the API, and wants to see of it.
struct Credentials {
    tls: Arc<ClientConfig>,
    authorization: HeaderValue,
}

/// A stream of bytes, whatever is beneath it.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

impl Api {
    /// Asks for `path`, and waits for the head of an answer that is 200.
    ///
    /// # Errors
    /// When there is none, within limits.
    pub(super) async fn get(&self, path: &str) -> Result<Answer, DiscoveryError> {
        let credentials = self.credentials().await?;
        let limit = self.connect_timeout;
        let connected = timeout(limit, self.connect(credentials.as_ref())).await;
        let stream = connected.unwrap_or(Err(DiscoveryError::Late { what: "no connection", limit }))?;
        let mut request = Request::get(path)
            .header(header::HOST, self.address.authority())
            .header(header::ACCEPT, "application/json")
            .header(header::USER_AGENT, USER_AGENT);
        if let Some(Credentials { authorization, .. }) = credentials {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        let request =
            request.body(Empty::<Bytes>::new()).expect("paths and hosts were checked when they were read");
        let answer = timeout(HEAD_LIMIT, exchange(stream, request)).await;
        let answer = answer.unwrap_or(Err(DiscoveryError::Late { what: "no answer", limit: HEAD_LIMIT }))?;
        let (status, answer) = answer;
        if status == StatusCode::OK { Ok(answer) } else { Err(answer.refusal(status).await) }
    }

    /// What is in the directory now; none where nothing secret may be sent.
    async fn credentials(&self) -> Result<Option<Credentials>, DiscoveryError> {
        if self.address.security == Security::Plain {
            return Ok(None);
        }
        let directory = self.credentials.clone();
        // A directory may lie on a disk that is slow to answer.
        let read = tokio::task::spawn_blocking(move || Credentials::read(&directory)).await;
        let failed = |why: String| DiscoveryError::Credentials { why };
        read.map_err(|error| failed(error.to_string()))?.map(Some).map_err(failed)
    }

    async fn connect(&self, credentials: Option<&Credentials>) -> Result<Box<dyn Stream>, DiscoveryError> {
        let ApiAddress { host, port, .. } = &self.address;
        let failed = |source| DiscoveryError::Connect { address: self.address.authority(), source };
        let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(failed)?;
        liveness::configure(&stream, liveness::WORKER_STALL);
        let Some(credentials) = credentials else { return Ok(Box::new(stream)) };
        let name = ServerName::try_from(host.clone());
        let name = name.map_err(|error| failed(std::io::Error::other(error)))?;
        let connector = TlsConnector::from(Arc::clone(&credentials.tls));
        Ok(Box::new(connector.connect(name, stream).await.map_err(failed)?))
    }
}

impl Credentials {
    /// Reads them; what is wrong never says the token.
    fn read(directory: &Path) -> Result<Self, String> {
        let read = |name: &str| {
            let path = directory.join(name);
            std::fs::read(&path).map_err(|error| format!("{} cannot be read: {error}", path.display()))
        };
        let authorities = read_certificates(&read("ca.crt")?)
            .map_err(|error| format!("{} {error}", directory.join("ca.crt").display()))?;
        let token = read("token")?;
        let mut bearer = b"Bearer ".to_vec();
        bearer.extend_from_slice(token.trim_ascii());
        let authorization = HeaderValue::from_bytes(&bearer).ok().filter(|_| !token.trim_ascii().is_empty());
        let mut authorization = authorization.ok_or_else(|| {
            format!("{} has no token that a header can carry", directory.join("token").display())
        })?;
        // Keeps it out of everything that prints headers.
        authorization.set_sensitive(true);
        Ok(Self { tls: trusting_only(&authorities), authorization })
    }
}

async fn exchange(
    stream: Box<dyn Stream>,
    request: Request<Empty<Bytes>>,
) -> Result<(StatusCode, Answer), DiscoveryError> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // What is wrong with it is told by the request as well.
    let connection = Connection(tokio::spawn(async { drop(connection.await) }).abort_handle());
    let response = sender.send_request(request).await?;
    Ok((response.status(), Answer { body: response.into_body(), _connection: connection }))
}

impl Answer {
    /// The next piece; `None` at the end.
    pub(super) async fn piece(&mut self) -> Option<Result<Bytes, DiscoveryError>> {
        loop {
            match self.body.frame().await? {
                // Trailers say nothing here.
                Ok(frame) => {
                    if let Ok(data) = frame.into_data() {
                        return Some(Ok(data));
                    }
                }
                Err(error) => return Some(Err(error.into())),
            }
        }
    }

    /// All of it.
    ///
    /// # Errors
    /// When it breaks off, is longer than `most_bytes`, or takes longer than `limit`.
    pub(super) async fn whole(self, most_bytes: usize, limit: Duration) -> Result<Bytes, DiscoveryError> {
        let Self { body, _connection } = self;
        let collected = timeout(limit, Limited::new(body, most_bytes).collect()).await;
        let collected = collected.map_err(|_| DiscoveryError::Late { what: "no whole answer", limit })?;
        collected.map(http_body_util::Collected::to_bytes).map_err(|error| {
            match error.downcast::<hyper::Error>() {
                Ok(error) => DiscoveryError::Broken(*error),
                Err(_) => DiscoveryError::TooLong { most_bytes },
            }
        })
    }

    async fn refusal(self, status: StatusCode) -> DiscoveryError {
        // What it says besides helps, and is not needed.
        let body = self.whole(MOST_STATUS_BYTES, HEAD_LIMIT).await.unwrap_or_default();
        DiscoveryError::Refused { status: status.as_u16(), message: Status::read(&body).message }
    }
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[test]
    fn addresses_of_the_api() {
        for (text, authority, security) in [
            ("https://10.96.0.1:443", "10.96.0.1:443", Security::Tls),
            ("https://api.example/", "api.example:443", Security::Tls),
            ("http://127.0.0.1:8001", "127.0.0.1:8001", Security::Plain),
            ("https://[fd00::1]:6443", "[fd00::1]:6443", Security::Tls),
        ] {
            let address = ApiAddress::parse(text).unwrap();
            assert_eq!((address.authority().as_str(), address.security), (authority, security));
        }
        for wrong in
            ["", "10.0.0.1", "ftp://a", "https://", "https://a:0", "https://a/b", "https://u@a", "https://a:"]
        {
            assert!(ApiAddress::parse(wrong).unwrap_err().contains("https://host:port"), "{wrong}");
        }
    }

    #[tokio::test]
    async fn nothing_secret_is_sent_in_plain_text() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = ApiAddress::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
        // There is nothing to read, and nobody tries to.
        let api = Api { address, credentials: "/nowhere".into(), connect_timeout: HEAD_LIMIT };
        let serving = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = BytesMut::new();
            while !head.ends_with(b"\r\n\r\n") {
                stream.read_buf(&mut head).await.unwrap();
            }
            let said = r#"{"kind": "Status", "code": 403, "message": "no"}"#;
            let reply = format!("HTTP/1.1 403 Forbidden\r\ncontent-length: {}\r\n\r\n{said}", said.len());
            stream.write_all(reply.as_bytes()).await.unwrap();
            String::from_utf8(head.to_vec()).unwrap()
        });
        let error = api.get("/path?query").await.err().unwrap().to_string();
        assert_eq!(error, "the Kubernetes API says 403: no");
        let head = serving.await.unwrap();
        assert!(
            head.starts_with("GET /path?query HTTP/1.1\r\n") && !head.contains("authorization"),
            "{head}"
        );
    }

    #[test]
    fn what_is_wrong_with_credentials_never_says_the_token() {
        let directory = std::env::temp_dir().join(format!("router-credentials-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let error = || Credentials::read(&directory).err().unwrap();
        assert!(error().contains("ca.crt cannot be read"), "{}", error());
        let authority = rcgen::generate_simple_self_signed(vec!["a".to_owned()]).unwrap().cert.pem();
        std::fs::write(directory.join("ca.crt"), authority).unwrap();
        assert!(error().contains("token cannot be read"), "{}", error());
        for token in ["", " \n", "secret\u{7}secret"] {
            std::fs::write(directory.join("token"), token).unwrap();
            assert!(error().contains("no token") && !error().contains("secret"), "{}", error());
        }
        std::fs::write(directory.join("token"), "secret\n").unwrap();
        let read = Credentials::read(&directory).unwrap();
        assert_eq!(read.authorization.as_bytes(), b"Bearer secret");
        assert!(!format!("{:?}", read.authorization).contains("secret"));
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
