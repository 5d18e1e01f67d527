//! `osb port-forward`: a port of this machine that leads to one in a sandbox.
//!
//! It goes the way that the server offers for ports: HTTP, with everything that begins as HTTP and goes on as
//! something else (WebSocket). There is no way for other protocols.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::Context as _;
use bytes::Bytes;
use clap::Args;
use futures_util::TryStreamExt as _;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Body as _, Frame, Incoming};
use hyper::header::{
    CONNECTION, CONTENT_LENGTH, HOST, HeaderMap, HeaderName, HeaderValue, LOCATION, TRANSFER_ENCODING,
    UPGRADE,
};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use osb_client::Sandbox;
use tokio::net::{TcpListener, TcpStream};

use crate::args::SandboxArg;
use crate::exit;
use crate::settings::Context;
use crate::signals::Signals;
use crate::streams::Streams;

/// Arguments of `port-forward`.
#[derive(Debug, Clone, Args)]
pub struct ForwardArgs {
    #[command(flatten)]
    sandbox: SandboxArg,
    /// Port here and in the sandbox; one number is both, 0 here is any free port
    #[arg(value_name = "LOCAL:REMOTE", required = true, value_parser = parse_ports)]
    ports: Vec<Ports>,
    /// Address to listen on
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    address: IpAddr,
}

/// A port here and one in the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ports {
    local: u16,
    remote: u16,
}

fn parse_ports(text: &str) -> Result<Ports, String> {
    let wrong = || format!("'{text}' is no pair of ports; use LOCAL:REMOTE such as 8000:80");
    let (local, remote) = text.split_once(':').unwrap_or((text, text));
    let number = |text: &str| text.parse::<u16>().map_err(|_| wrong());
    match (number(local)?, number(remote)?) {
        (_, 0) => Err(wrong()),
        (local, remote) => Ok(Ports { local, remote }),
    }
}

type Answer = Response<BoxBody<Bytes, reqwest::Error>>;

/// The way to a port in a sandbox.
#[derive(Debug, Clone)]
struct Way {
    http: reqwest::Client,
    /// Without a slash at its end.
    base: String,
    /// Path of `base`, which answers may repeat.
    prefix: String,
    headers: HeaderMap,
}

pub(crate) async fn run(context: &Context, args: ForwardArgs, streams: &mut Streams) -> anyhow::Result<u8> {
    let mut signals = Signals::new()?;
    let sandbox = args.sandbox.handle(context);
    let mut listeners = Vec::new();
    for ports in args.ports {
        let way = way(context, &sandbox, ports.remote).await?;
        let address = SocketAddr::new(args.address, ports.local);
        let listener =
            TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
        let address = listener.local_addr()?;
        streams
            .note(&format!("http://{address} leads to port {} of {} (HTTP only)", ports.remote, sandbox.id()))
            .await;
        listeners.push(tokio::spawn(accept(listener, way)));
    }
    let signal = signals.next().await;
    for listener in listeners {
        listener.abort();
    }
    Ok(exit::SIGNAL + signal)
}

async fn way(context: &Context, sandbox: &Sandbox, port: u16) -> anyhow::Result<Way> {
    let endpoint = sandbox.endpoint(port).await?;
    let config = context.client.config();
    let base = format!("{}://{}", config.protocol.as_str(), endpoint.endpoint.trim_end_matches('/'));
    let mut headers = HeaderMap::new();
    for (name, value) in endpoint.headers {
        let name = HeaderName::try_from(name).context("endpoint header")?;
        headers.insert(name, HeaderValue::try_from(value).context("endpoint header")?);
    }
    let url = reqwest::Url::parse(&base).with_context(|| format!("'{base}' is no address"))?;
    let http = osb_client::http::client(osb_client::http::Options {
        direct: url.host_str().is_some_and(osb_client::http::is_loopback),
        ..osb_client::http::Options::default()
    })?;
    let prefix = url.path().trim_end_matches('/').to_owned();
    Ok(Way { http, base, prefix, headers })
}

async fn accept(listener: TcpListener, way: Way) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(serve(stream, way.clone()))),
            // Out of descriptors: those in use will be given back.
            Err(_) => tokio::time::sleep(std::time::Duration::from_millis(50)).await,
        }
    }
}

async fn serve(stream: TcpStream, way: Way) {
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let way = way.clone();
        async move { Ok::<_, std::convert::Infallible>(way.pass(request).await) }
    });
    // A connection that ends in the middle is its own affair.
    let _ = hyper::server::conn::http1::Builder::new()
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await;
}

impl Way {
    async fn pass(&self, mut request: Request<Incoming>) -> Answer {
        let target = request.uri().path_and_query().map(|target| target.as_str().to_owned());
        let target = target.filter(|target| target.starts_with('/')).unwrap_or_else(|| "/".to_owned());
        let upgrade = request.headers().get(UPGRADE).cloned();
        let local = request.headers().get(HOST).cloned();
        let client = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
        let method = request.method().clone();
        let mut outgoing = self.http.request(method, format!("{}{target}", self.base));
        let mut headers = request.headers().clone();
        // Between neighbours only; the body is framed anew.
        for name in [CONNECTION, HOST, TRANSFER_ENCODING, HeaderName::from_static("keep-alive"), UPGRADE] {
            headers.remove(name);
        }
        if let Some(protocol) = upgrade {
            headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
            headers.insert(UPGRADE, protocol);
        } else if !request.body().is_end_stream() {
            let length = headers.get(CONTENT_LENGTH).cloned();
            outgoing = outgoing.body(reqwest::Body::wrap_stream(request.into_body().into_data_stream()));
            if let Some(length) = length {
                outgoing = outgoing.header(CONTENT_LENGTH, length);
            }
        }
        headers.remove(CONTENT_LENGTH);
        headers.extend(self.headers.clone());
        match outgoing.headers(headers).send().await {
            Ok(answer) => self.answer(answer, client, local.as_ref()),
            Err(error) => failure(&error),
        }
    }

    fn answer(
        &self,
        answer: reqwest::Response,
        client: Option<hyper::upgrade::OnUpgrade>,
        local: Option<&HeaderValue>,
    ) -> Answer {
        let status = answer.status();
        let mut headers = answer.headers().clone();
        if let Some(location) = headers.get(LOCATION).and_then(|value| self.local_location(value, local)) {
            headers.insert(LOCATION, location);
        }
        let body = match (status, client) {
            (StatusCode::SWITCHING_PROTOCOLS, Some(client)) => {
                tokio::spawn(async move {
                    let (Ok(server), Ok(client)) = tokio::join!(answer.upgrade(), client) else { return };
                    let (mut server, mut client) = (server, TokioIo::new(client));
                    // The end of either side is the end.
                    let _ = tokio::io::copy_bidirectional(&mut server, &mut client).await;
                });
                empty()
            }
            _ => {
                headers.remove(TRANSFER_ENCODING);
                headers.remove(CONNECTION);
                StreamBody::new(answer.bytes_stream().map_ok(Frame::data)).boxed()
            }
        };
        let mut response = Response::new(body);
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        response
    }

    /// A redirect to the server's path for this port, as it is seen from here.
    fn local_location(&self, value: &HeaderValue, local: Option<&HeaderValue>) -> Option<HeaderValue> {
        let location = value.to_str().ok()?;
        let path = match location.strip_prefix(&self.base) {
            // Whole, with scheme and host.
            Some(path) => {
                let host = local.and_then(|host| host.to_str().ok())?;
                return HeaderValue::try_from(format!("http://{host}{path}")).ok();
            }
            None => location.strip_prefix(&self.prefix).filter(|_| !self.prefix.is_empty())?,
        };
        let path = match path.starts_with('/') {
            true => path.to_owned(),
            false if path.is_empty() || path.starts_with(['?', '#']) => format!("/{path}"),
            false => return None,
        };
        HeaderValue::try_from(path).ok()
    }
}

fn empty() -> BoxBody<Bytes, reqwest::Error> {
    Full::new(Bytes::new()).map_err(|never| match never {}).boxed()
}

fn failure(error: &reqwest::Error) -> Answer {
    let mut text = "osb port-forward: the server cannot be reached".to_owned();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text.push('\n');
    let mut response = Response::new(Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed());
    *response.status_mut() = StatusCode::BAD_GATEWAY;
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports() {
        assert_eq!(parse_ports("8000:80"), Ok(Ports { local: 8000, remote: 80 }));
        assert_eq!(parse_ports("80"), Ok(Ports { local: 80, remote: 80 }));
        assert_eq!(parse_ports("0:80"), Ok(Ports { local: 0, remote: 80 }));
        for bad in ["", ":", "80:", ":80", "80:0", "70000", "a:b", "1:2:3"] {
            assert!(parse_ports(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn redirects_lead_back_here() {
        let way = Way {
            http: osb_client::http::client(osb_client::http::Options::default()).unwrap(),
            base: "http://h:1/sandboxes/s/proxy/80".to_owned(),
            prefix: "/sandboxes/s/proxy/80".to_owned(),
            headers: HeaderMap::new(),
        };
        let local = HeaderValue::from_static("localhost:8000");
        let moved = |location: &'static str| {
            let location = HeaderValue::from_static(location);
            way.local_location(&location, Some(&local)).map(|value| value.to_str().unwrap().to_owned())
        };
        assert_eq!(moved("/sandboxes/s/proxy/80/a?b").as_deref(), Some("/a?b"));
        assert_eq!(moved("/sandboxes/s/proxy/80").as_deref(), Some("/"));
        assert_eq!(moved("http://h:1/sandboxes/s/proxy/80/a").as_deref(), Some("http://localhost:8000/a"));
        for other in ["/a", "a", "https://example.org/a", "/sandboxes/s/proxy/8080/a"] {
            assert_eq!(moved(other), None, "{other}");
        }
    }
}
