//! Runs `osb`'s client commands inside of the test, against a server of the test's own making.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use clap::Parser;
use osb_cli::{Action, Globals, Streams};
use tokio::io::AsyncWrite;

use crate::support::Fake;

#[derive(Parser)]
#[command(name = "osb")]
pub struct Osb {
    #[command(flatten)]
    globals: Globals,
    #[command(subcommand)]
    action: Action,
}

/// Keeps what is written; or refuses it as a pipe does whose reader has gone.
#[derive(Clone, Default)]
pub struct Sink {
    pub bytes: Arc<Mutex<Vec<u8>>>,
    pub broken: bool,
}

impl AsyncWrite for Sink {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.broken {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        self.bytes.lock().unwrap().extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[derive(Debug)]
pub struct Done {
    pub code: u8,
    pub out: String,
    pub err: String,
}

/// Columns and lines of a terminal.
pub type Size = fn() -> Option<(usize, usize)>;

#[derive(Clone, Copy, Default)]
pub struct How<'a> {
    pub terminal: bool,
    pub broken: bool,
    pub env: &'a [(&'a str, &'a str)],
    pub stdin: &'static [u8],
    pub size: Option<Size>,
}

pub async fn osb_how(fake: &Fake, args: &[&str], how: How<'_>) -> Done {
    let address = fake.address.to_string();
    let osb = Osb::try_parse_from([&["osb"], args].concat()).unwrap_or_else(|error| panic!("{error}"));
    let (out, err) = (Sink { broken: how.broken, ..Sink::default() }, Sink::default());
    let mut streams = Streams {
        stdin: Box::pin(how.stdin),
        stdout: Box::pin(out.clone()),
        stderr: Box::pin(err.clone()),
        stdin_is_terminal: false,
        stdout_is_terminal: how.terminal,
        stderr_is_terminal: how.terminal,
        size: how.size.unwrap_or(|| None),
        reader_gone: || Box::pin(std::future::pending()),
    };
    let var = |name: &str| {
        let given = how.env.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        given.or_else(|| (name == "OPEN_SANDBOX_DOMAIN").then(|| address.clone()))
    };
    let code = osb_cli::run(&osb.globals, osb.action, var, &mut streams).await;
    let text = |sink: &Sink| String::from_utf8(sink.bytes.lock().unwrap().clone()).unwrap();
    Done { code, out: text(&out), err: without_request_id(&text(&err)) }
}

/// Ids of requests are new each time.
pub fn without_request_id(text: &str) -> String {
    let mut text = text.to_owned();
    while let Some(at) = text.find(", request ") {
        let end = at + text[at..].find([')', ';', '\n']).unwrap_or(text.len() - at);
        text.replace_range(at..end, "");
    }
    text
}

pub async fn osb(fake: &Fake, args: &[&str]) -> Done {
    osb_how(fake, args, How::default()).await
}
