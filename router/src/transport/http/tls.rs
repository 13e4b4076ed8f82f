//! Which certificates a worker may show, and other servers.

use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};

/// Protocols we speak, the one we prefer first.
const ALPN: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// Reads the certificates of a PEM file.
///
/// # Errors
/// When there is none, or one cannot be read.
pub fn read_certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|error| format!("is no PEM file: {error}"))?;
    let mut store = RootCertStore::empty();
    for certificate in &found {
        store.add(certificate.clone()).map_err(|error| format!("has a certificate that is none: {error}"))?;
    }
    if found.is_empty() {
        return Err("has no certificate; it should begin with -----BEGIN CERTIFICATE-----".to_owned());
    }
    Ok(found)
}

/// Trusts the system's authorities, and `more`.
pub(super) fn client_config(more: &[CertificateDer<'static>]) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    let system = rustls_native_certs::load_native_certs();
    for error in &system.errors {
        tracing::warn!(%error, "some of the system's certificate authorities cannot be read");
    }
    roots.add_parsable_certificates(system.certs);
    // They were read by `read_certificates`, which has tried the same.
    roots.add_parsable_certificates(more.iter().cloned());
    if roots.is_empty() {
        tracing::warn!("no certificate authority is known; https workers need --worker-ca");
    }
    let mut config = trusting(roots);
    config.alpn_protocols = ALPN.map(<[u8]>::to_vec).into();
    Arc::new(config)
}

/// Trusts `authorities` and nobody else, and speaks whatever is spoken without asking. For servers that are no workers.
#[must_use]
pub fn trusting_only(authorities: &[CertificateDer<'static>]) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(authorities.iter().cloned());
    Arc::new(trusting(roots))
}

fn trusting(roots: RootCertStore) -> ClientConfig {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("ring speaks TLS 1.2 and 1.3")
        .with_root_certificates(roots)
        .with_no_client_auth()
}
