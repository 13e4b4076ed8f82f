//! TLS for clients: rustls with ring, TLS 1.2 and 1.3, HTTP/2 and HTTP/1.1 by ALPN. A certificate that is renewed on disk is
//! taken up by itself.
//!
//! Knows nothing of what is carried. Next: [`connection`](super::connection).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// How often the files are looked at. Certificates are renewed days before they end.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// Why there is no TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file could not be read, or is not what it should be.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: pem::Error,
    },
    /// The certificate file has no certificate.
    #[error("{}: there is no certificate in PEM in it", path.display())]
    NoCertificate {
        /// The file.
        path: PathBuf,
    },
    /// Certificate and key do not fit, or are of a kind that is not supported.
    #[error("certificate and key cannot be used: {0}")]
    Unusable(#[from] rustls::Error),
}

/// The listener's TLS.
pub struct Tls {
    certificate: PathBuf,
    key: PathBuf,
    config: ArcSwap<ServerConfig>,
}

/// What tells that a file has changed.
type Stamp = Option<(SystemTime, u64)>;

impl Tls {
    /// Reads a chain of certificates and its key, both in PEM.
    ///
    /// # Errors
    /// When they cannot be read, or do not fit together.
    pub fn load(certificate: &Path, key: &Path) -> Result<Self, TlsError> {
        let config = ArcSwap::from_pointee(read(certificate, key)?);
        Ok(Self { certificate: certificate.to_owned(), key: key.to_owned(), config })
    }

    /// Does the handshake with a client.
    ///
    /// # Errors
    /// When the client speaks something else, or leaves.
    pub async fn accept(&self, stream: TcpStream) -> std::io::Result<TlsStream<TcpStream>> {
        TlsAcceptor::from(self.config.load_full()).accept(stream).await
    }

    /// Takes up new files for ever. Those that cannot be used are logged, and the old ones stay.
    pub async fn reload(self: Arc<Self>) {
        let mut known = self.stamps();
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            let stamps = self.stamps();
            if stamps == known {
                continue;
            }
            known = stamps;
            match read(&self.certificate, &self.key) {
                Ok(config) => {
                    self.config.store(Arc::new(config));
                    tracing::info!(certificate = %self.certificate.display(), "certificate reloaded");
                }
                Err(error) => tracing::warn!(%error, "new certificate not taken, the old one stays"),
            }
        }
    }

    fn stamps(&self) -> [Stamp; 2] {
        [&self.certificate, &self.key].map(|path| {
            let metadata = std::fs::metadata(path).ok()?;
            Some((metadata.modified().ok()?, metadata.len()))
        })
    }
}

fn read(certificate: &Path, key: &Path) -> Result<ServerConfig, TlsError> {
    let of = |path: &Path| {
        let path = path.to_owned();
        move |source| TlsError::File { path, source }
    };
    let chain: Vec<_> = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect::<Result<_, _>>)
        .map_err(of(certificate))?;
    if chain.is_empty() {
        return Err(TlsError::NoCertificate { path: certificate.to_owned() });
    }
    let key = PrivateKeyDer::from_pem_file(key).map_err(of(key))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_file_and_what_is_wrong() {
        let folder = std::env::temp_dir().join(format!("router-tls-test-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (certificate, key, other) = (folder.join("cert"), folder.join("key"), folder.join("other"));
        let pair = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        let stranger = rcgen::KeyPair::generate().unwrap();
        std::fs::write(&certificate, pair.cert.pem()).unwrap();
        std::fs::write(&key, pair.signing_key.serialize_pem()).unwrap();
        std::fs::write(&other, stranger.serialize_pem()).unwrap();
        let message =
            |certificate: &Path, key: &Path| Tls::load(certificate, key).err().map(|error| error.to_string());
        assert_eq!(message(&certificate, &key), None);
        assert!(message(&key, &key).unwrap().contains("no certificate"));
        assert!(message(&folder.join("none"), &key).unwrap().contains("none"));
        assert!(message(&certificate, &certificate).is_some());
        assert!(message(&certificate, &other).unwrap().contains("cannot be used"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
