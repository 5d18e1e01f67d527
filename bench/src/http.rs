//! One keep-alive HTTP/1.1 connection, as bare as a client can be.

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Either, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http1::SendRequest;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

type Chunks = StreamBody<tokio_chunks::Repeat>;
type Body = Either<Full<Bytes>, Chunks>;

mod tokio_chunks {
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use super::{Bytes, Frame};

    /// The same chunk over and over, `left` times.
    #[derive(Debug)]
    pub(crate) struct Repeat {
        pub(crate) first: Option<Bytes>,
        pub(crate) chunk: Bytes,
        pub(crate) left: usize,
        pub(crate) last: Option<Bytes>,
    }

    impl futures_core::Stream for Repeat {
        type Item = Result<Frame<Bytes>, std::convert::Infallible>;

        fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
            if let Some(first) = self.first.take() {
                return Poll::Ready(Some(Ok(Frame::data(first))));
            }
            if self.left > 0 {
                self.left -= 1;
                return Poll::Ready(Some(Ok(Frame::data(self.chunk.clone()))));
            }
            Poll::Ready(self.last.take().map(|last| Ok(Frame::data(last))))
        }
    }
}

/// A connection to the server.
pub(crate) struct Conn {
    sender: SendRequest<Body>,
    host: String,
    key: String,
}

impl Conn {
    /// Connects to `host:port`; `key` goes with every request.
    pub(crate) async fn open(host: &str, key: &str) -> Result<Self> {
        let stream = TcpStream::connect(host).await.with_context(|| format!("connecting to {host}"))?;
        stream.set_nodelay(true)?;
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        Ok(Self { sender, host: host.to_owned(), key: key.to_owned() })
    }

    fn request(&self, method: &str, path: &str) -> hyper::http::request::Builder {
        Request::builder()
            .method(method)
            .uri(path)
            .header("host", &self.host)
            .header("open-sandbox-api-key", &self.key)
    }

    /// Sends JSON (or nothing, for an empty text) and gives the head and the unread body.
    pub(crate) async fn send(&mut self, method: &str, path: &str, json: &str) -> Result<Response<Incoming>> {
        let mut request = self.request(method, path);
        if !json.is_empty() {
            request = request.header("content-type", "application/json");
        }
        self.sender.ready().await?;
        Ok(self.sender.send_request(request.body(Either::Left(Full::from(json.to_owned())))?).await?)
    }

    /// As [`Conn::send`], and reads the whole body.
    pub(crate) async fn call(&mut self, method: &str, path: &str, json: &str) -> Result<(StatusCode, Bytes)> {
        let answer = self.send(method, path, json).await?;
        let status = answer.status();
        Ok((status, answer.into_body().collect().await?.to_bytes()))
    }

    /// Creates a sandbox with one processor and gives its id.
    pub(crate) async fn create(&mut self, image: &str) -> Result<String> {
        self.create_with(image, 1).await
    }

    /// Creates a sandbox with some processors and gives its id.
    pub(crate) async fn create_with(&mut self, image: &str, processors: usize) -> Result<String> {
        let body = format!(
            r#"{{"image":{{"uri":"{image}"}},"entrypoint":["tail","-f","/dev/null"],"resourceLimits":{{"cpu":"{processors}","memory":"2Gi"}},"timeout":600}}"#
        );
        let (status, answer) = self.call("POST", "/v1/sandboxes", &body).await?;
        if status != StatusCode::ACCEPTED {
            bail!("create answered {status}: {}", String::from_utf8_lossy(&answer));
        }
        let answer: serde_json::Value = serde_json::from_slice(&answer)?;
        Ok(answer["id"].as_str().context("create answered without an id")?.to_owned())
    }

    /// Runs shell text to the end of its stream and checks that it succeeded.
    pub(crate) async fn exec(&mut self, id: &str, command: &str) -> Result<()> {
        self.run(id, &serde_json::json!({ "command": command })).await
    }

    /// As [`Conn::exec`], for `/bin/true` without a shell.
    pub(crate) async fn exec_true(&mut self, id: &str) -> Result<()> {
        self.run(id, &serde_json::json!({ "argv": ["/bin/true"] })).await
    }

    /// Opens a shell session and gives its id.
    pub(crate) async fn session(&mut self, id: &str) -> Result<String> {
        let (status, answer) =
            self.call("POST", &format!("/v1/sandboxes/{id}/proxy/44772/session"), "{}").await?;
        if status != StatusCode::OK {
            bail!("session answered {status}: {}", String::from_utf8_lossy(&answer));
        }
        let answer: serde_json::Value = serde_json::from_slice(&answer)?;
        Ok(answer["session_id"].as_str().context("session answered without an id")?.to_owned())
    }

    /// Runs shell text in a session to the end of its stream and checks that it succeeded.
    pub(crate) async fn session_run(&mut self, id: &str, session: &str, command: &str) -> Result<()> {
        let path = format!("/v1/sandboxes/{id}/proxy/44772/session/{session}/run");
        self.run_at(&path, &serde_json::json!({ "command": command })).await
    }

    /// Makes an isolated session on `/workspace` and gives its id.
    pub(crate) async fn isolated(&mut self, id: &str, mode: &str) -> Result<String> {
        let body = serde_json::json!({ "workspace": { "path": "/workspace", "mode": mode } }).to_string();
        let path = format!("/v1/sandboxes/{id}/proxy/44772/v1/isolated/session");
        let (status, answer) = self.call("POST", &path, &body).await?;
        if status != StatusCode::CREATED {
            bail!("an isolated session answered {status}: {}", String::from_utf8_lossy(&answer));
        }
        let answer: serde_json::Value = serde_json::from_slice(&answer)?;
        Ok(answer["session_id"].as_str().context("an isolated session answered without an id")?.to_owned())
    }

    /// Ends an isolated session.
    pub(crate) async fn isolated_delete(&mut self, id: &str, session: &str) -> Result<()> {
        let path = format!("/v1/sandboxes/{id}/proxy/44772/v1/isolated/session/{session}");
        let (status, answer) = self.call("DELETE", &path, "").await?;
        if status != StatusCode::OK {
            bail!("its deletion answered {status}: {}", String::from_utf8_lossy(&answer));
        }
        Ok(())
    }

    /// Runs shell text in an isolated session to the end of its stream and checks that it succeeded.
    pub(crate) async fn isolated_run(&mut self, id: &str, session: &str, code: &str) -> Result<()> {
        let path = format!("/v1/sandboxes/{id}/proxy/44772/v1/isolated/session/{session}/run");
        self.run_at(&path, &serde_json::json!({ "code": code })).await
    }

    /// Starts shell text and gives its stream.
    pub(crate) async fn command(&mut self, id: &str, command: &str) -> Result<Response<Incoming>> {
        let body = serde_json::json!({ "command": command }).to_string();
        let answer = self.send("POST", &format!("/v1/sandboxes/{id}/proxy/44772/command"), &body).await?;
        if answer.status() != StatusCode::OK {
            bail!("command answered {}", answer.status());
        }
        Ok(answer)
    }

    /// Runs shell text and gives what it has written to its standard output.
    pub(crate) async fn output(&mut self, id: &str, command: &str) -> Result<String> {
        let body = self.command(id, command).await?.into_body().collect().await?.to_bytes();
        let mut text = String::new();
        for event in body.split(|&byte| byte == b'\n').filter(|event| !event.is_empty()) {
            let event: serde_json::Value = serde_json::from_slice(event)?;
            if event["type"] == "stdout" {
                text.push_str(event["text"].as_str().unwrap_or_default());
            }
        }
        Ok(text)
    }

    async fn run(&mut self, id: &str, body: &serde_json::Value) -> Result<()> {
        self.run_at(&format!("/v1/sandboxes/{id}/proxy/44772/command"), body).await
    }

    async fn run_at(&mut self, path: &str, body: &serde_json::Value) -> Result<()> {
        let (status, answer) = self.call("POST", path, &body.to_string()).await?;
        if status != StatusCode::OK || !answer.windows(18).any(|window| window == b"execution_complete") {
            bail!("command answered {status}: {}", String::from_utf8_lossy(&answer));
        }
        Ok(())
    }

    /// Deletes a sandbox.
    pub(crate) async fn delete(&mut self, id: &str) -> Result<()> {
        let (status, answer) = self.call("DELETE", &format!("/v1/sandboxes/{id}"), "").await?;
        if status != StatusCode::NO_CONTENT {
            bail!("delete answered {status}: {}", String::from_utf8_lossy(&answer));
        }
        Ok(())
    }

    /// Made now, so that no file holds it, this program included.
    fn boundary(&self) -> String {
        format!("{:x}-{:x}", std::process::id(), self.host.len())
    }

    /// Uploads `chunks` × `chunk` as one file.
    pub(crate) async fn upload(&mut self, id: &str, path: &str, chunk: Bytes, chunks: usize) -> Result<()> {
        let boundary = self.boundary();
        let body = StreamBody::new(tokio_chunks::Repeat {
            first: Some(Bytes::from(file_head(&boundary, path))),
            chunk,
            left: chunks,
            last: Some(Bytes::from(format!("\r\n--{boundary}--\r\n"))),
        });
        self.post_files(id, &boundary, Either::Right(body)).await
    }

    /// Uploads `files` files with the same contents in one call.
    pub(crate) async fn upload_many(
        &mut self,
        id: &str,
        directory: &str,
        contents: &[u8],
        files: usize,
    ) -> Result<()> {
        let boundary = self.boundary();
        let mut body = Vec::new();
        for number in 0..files {
            body.extend_from_slice(file_head(&boundary, &format!("{directory}/{number}")).as_bytes());
            body.extend_from_slice(contents);
            body.extend_from_slice(b"\r\n");
        }
        body.extend_from_slice(format!("--{boundary}--\r\n").as_bytes());
        self.post_files(id, &boundary, Either::Left(Full::from(body))).await
    }

    async fn post_files(&mut self, id: &str, boundary: &str, body: Body) -> Result<()> {
        let request = self
            .request("POST", &format!("/v1/sandboxes/{id}/proxy/44772/files/upload"))
            .header("content-type", format!("multipart/form-data; boundary={boundary}"))
            .body(body)?;
        self.sender.ready().await?;
        let answer = self.sender.send_request(request).await?;
        let status = answer.status();
        let text = answer.into_body().collect().await?.to_bytes();
        if status != StatusCode::OK {
            bail!("upload answered {status}: {}", String::from_utf8_lossy(&text));
        }
        Ok(())
    }

    /// Downloads a file and gives its size.
    pub(crate) async fn download(&mut self, id: &str, path: &str) -> Result<u64> {
        let answer = self
            .send("GET", &format!("/v1/sandboxes/{id}/proxy/44772/files/download?path={path}"), "")
            .await?;
        if answer.status() != StatusCode::OK {
            bail!("download answered {}", answer.status());
        }
        let mut body = answer.into_body();
        let mut size = 0;
        while let Some(frame) = body.frame().await {
            if let Some(data) = frame?.data_ref() {
                size += data.len() as u64;
            }
        }
        Ok(size)
    }
}

/// Everything before a file's bytes.
fn file_head(boundary: &str, path: &str) -> String {
    format!(
        "--{boundary}\r\nContent-Disposition: form-data; name=\"metadata\"; filename=\"metadata\"\r\nContent-Type: application/json\r\n\r\n{{\"path\":\"{path}\",\"mode\":644}}\r\n--{boundary}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\nContent-Type: application/octet-stream\r\n\r\n"
    )
}
