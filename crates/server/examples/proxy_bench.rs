//! The proxy alone, to be measured with any HTTP load generator.
//!
//! `proxy_bench backend ADDRESS` answers `/` with a few bytes, `/big` with a gibibyte, and swallows uploads.
//! `proxy_bench proxy ADDRESS BACKEND` forwards `/sandboxes/{id}/proxy/80` to it and prints the path.

use std::net::SocketAddr;
use std::sync::Arc;

use async_trait::async_trait;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use futures_util::{StreamExt, stream};
use http::{HeaderMap, StatusCode};
use osb_protocol::ids::SandboxId;
use osb_runtime::{
    Adopted, ConnectError, CreateError, Created, Fetch, Handle, Image, ImageSource, Runtime, RuntimeError,
    RuntimeEvent, SandboxSpec, Stream, Target,
};
use osb_server::error::ApiError;
use osb_server::proxy::{Options, Proxy, Sandboxes};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// Connects to one address, whatever is asked for.
struct Fixed(SocketAddr);

#[async_trait]
impl Runtime for Fixed {
    fn room(&self) -> Result<(), CreateError> {
        Ok(())
    }

    async fn find_image(&self, _source: &ImageSource) -> Result<Option<Image>, CreateError> {
        Ok(None)
    }
    fn fetch_image(&self, _source: ImageSource) -> Fetch {
        unreachable!("nothing is created")
    }
    async fn create(&self, _spec: SandboxSpec, _image: Image) -> Result<Created, CreateError> {
        Err(CreateError::Failed("only connects".to_owned()))
    }
    async fn adopt(
        &self,
        _known: Vec<(SandboxId, Handle)>,
    ) -> Result<Vec<(SandboxId, Adopted)>, RuntimeError> {
        Ok(Vec::new())
    }
    async fn delete(&self, _id: SandboxId) -> Result<(), RuntimeError> {
        Ok(())
    }
    async fn settled(&self) {}
    fn events(&self) -> Option<mpsc::UnboundedReceiver<RuntimeEvent>> {
        None
    }
    async fn connect(&self, _id: SandboxId, _target: Target) -> Result<Stream, ConnectError> {
        Ok(Stream::Tcp(TcpStream::connect(self.0).await?))
    }
    async fn entrypoint_log(&self, _id: SandboxId, _max_bytes: usize) -> Result<Vec<u8>, RuntimeError> {
        Ok(Vec::new())
    }
    async fn shutdown(&self) {}
}

#[derive(Clone)]
struct Anything;

impl Sandboxes for Anything {
    fn admit(&self, id: &str, _headers: &HeaderMap) -> Result<SandboxId, ApiError> {
        id.parse().map_err(|_| ApiError::SandboxNotFound)
    }
    fn ended(&self, _id: SandboxId) -> Option<String> {
        None
    }
}

async fn big() -> Response {
    const BLOCK: usize = 256 << 10;
    let block = Bytes::from(vec![0; BLOCK]);
    let blocks = stream::repeat(block).take((1 << 30) / BLOCK).map(Ok::<_, std::io::Error>);
    ([("content-length", (1_u64 << 30).to_string())], Body::from_stream(blocks)).into_response()
}

async fn swallow(request: Request) -> String {
    let mut frames = request.into_body().into_data_stream();
    let mut total = 0;
    while let Some(Ok(frame)) = frames.next().await {
        total += frame.len();
    }
    format!("{total}\n")
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (address, app) = match words[..] {
        ["backend", address] => {
            let app = Router::new()
                .route("/", any(async || "ok"))
                .route("/big", any(big))
                .route("/swallow", any(swallow));
            (address, app)
        }
        ["proxy", address, backend] => {
            let proxy = Arc::new(Proxy::new(Arc::new(Fixed(backend.parse()?)), Options::default()));
            #[expect(clippy::print_stdout, reason = "the user needs the path")]
            {
                println!("/sandboxes/{}/proxy/80", SandboxId::random());
            }
            let app = Router::new().fallback(move |request: Request| {
                let proxy = Arc::clone(&proxy);
                async move {
                    proxy
                        .call(&Anything, request)
                        .await
                        .unwrap_or_else(|_| StatusCode::NOT_FOUND.into_response())
                }
            });
            (address, app)
        }
        _ => return Err("usage: proxy_bench backend ADDRESS | proxy ADDRESS BACKEND".into()),
    };
    let listener = TcpListener::bind(address).await?;
    use axum::serve::ListenerExt;
    let listener = listener.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    });
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
