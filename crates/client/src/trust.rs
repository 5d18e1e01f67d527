//! Which servers a TLS connection is believed to reach.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, RootCertStore, SignatureScheme};

/// Where Linux distributions keep the bundle; the first that exists counts.
const SYSTEM_BUNDLES: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];

/// Verifies servers as [`WebPkiServerVerifier`] does, which is made when the first one has to be verified: reading
/// and parsing a bundle takes milliseconds and a megabyte, and most clients only speak plain HTTP to a server nearby.
#[derive(Debug)]
pub(crate) struct Trust {
    authorities: Vec<CertificateDer<'static>>,
    bundles: Vec<PathBuf>,
    provider: Arc<CryptoProvider>,
    verifier: OnceLock<Arc<WebPkiServerVerifier>>,
}

impl Trust {
    /// In the roots built in, the system's, and `authorities`.
    pub(crate) fn new(authorities: Vec<CertificateDer<'static>>, provider: Arc<CryptoProvider>) -> Self {
        let named = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
        let bundles = named.into_iter().chain(SYSTEM_BUNDLES.iter().map(Into::into)).collect();
        Self { authorities, bundles, provider, verifier: OnceLock::new() }
    }

    fn verifier(&self) -> Result<&WebPkiServerVerifier, rustls::Error> {
        if let Some(verifier) = self.verifier.get() {
            return Ok(verifier);
        }
        let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
        roots.add_parsable_certificates(self.system());
        roots.add_parsable_certificates(self.authorities.iter().cloned());
        let built = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), self.provider.clone())
            .build()
            .map_err(|error| rustls::Error::General(error.to_string()))?;
        Ok(self.verifier.get_or_init(|| built))
    }

    /// Certificates of the bundle that `SSL_CERT_FILE` names, else of the system's. Unreadable ones are left out:
    /// those built in remain.
    fn system(&self) -> Vec<CertificateDer<'static>> {
        self.bundles
            .iter()
            .find_map(|path| CertificateDer::pem_file_iter(path).ok())
            .map(|certificates| certificates.filter_map(Result::ok).collect())
            .unwrap_or_default()
    }

    fn algorithms(&self) -> &WebPkiSupportedAlgorithms {
        &self.provider.signature_verification_algorithms
    }
}

impl ServerCertVerifier for Trust {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.verifier()?.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, self.algorithms())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, self.algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms().supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A new authority as a PEM file has it, and a certificate of it for `example.org`.
    fn authority() -> (String, CertificateDer<'static>) {
        let authority_key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new([]).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let authority = params.self_signed(&authority_key).unwrap();
        let issuer = rcgen::Issuer::new(params, authority_key);
        let params = rcgen::CertificateParams::new(["example.org".to_owned()]).unwrap();
        let certificate = params.signed_by(&rcgen::KeyPair::generate().unwrap(), &issuer).unwrap();
        (authority.pem(), certificate.der().clone())
    }

    #[test]
    fn a_bundle_is_read_when_a_server_has_to_be_believed() {
        let dir = tempfile::tempdir().unwrap();
        let bundle = dir.path().join("bundle.pem");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut trust = Trust::new(Vec::new(), provider);
        trust.bundles = vec![dir.path().join("none"), bundle.clone()];
        assert!(!trust.supported_verify_schemes().is_empty());
        // Only now is there a bundle.
        let ((pem, known), (_, stranger)) = (authority(), authority());
        std::fs::write(&bundle, pem).unwrap();
        let verify = |certificate: &CertificateDer<'_>, name: &'static str| {
            let name = ServerName::try_from(name).unwrap();
            trust.verify_server_cert(certificate, &[], &name, &[], UnixTime::now())
        };
        verify(&known, "example.org").unwrap();
        verify(&known, "example.com").unwrap_err();
        verify(&stranger, "example.org").unwrap_err();
        // And it is read once.
        std::fs::remove_file(&bundle).unwrap();
        verify(&known, "example.org").unwrap();
    }
}
