//! What the number of live sandboxes costs.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::count;
use crate::http::Conn;
use crate::server::{Options, Server};
use crate::stats::Samples;

const MANY: usize = 500;
/// Creates in a row on one server, so that its pool has time to fill while the other's turn is.
const CREATES: usize = 5;
const REST: Duration = Duration::from_millis(100);

/// A server with some sandboxes, and what its calls took.
struct Side {
    conn: Conn,
    image: String,
    ids: Vec<String>,
    /// Ended when this is dropped.
    _server: Server,
}

impl Side {
    async fn with(live: usize) -> Result<Self> {
        let server = Server::start(Options::default()).await?;
        server.settle().await;
        let mut conn = server.conn().await?;
        let image = server.image.clone();
        let mut ids = Vec::new();
        while ids.len() < live {
            ids.push(conn.create(&image).await?);
        }
        conn.exec(&ids[0], "true").await?;
        server.settle().await;
        Ok(Self { conn, image, ids, _server: server })
    }

    async fn get(&mut self, path: &str, samples: &mut Samples) -> Result<()> {
        let began = Instant::now();
        let (status, _) = self.conn.call("GET", path, "").await?;
        if status.is_success() {
            samples.push_ms(began.elapsed());
        } else {
            samples.fail();
        }
        Ok(())
    }

    async fn create(&mut self, samples: &mut Samples) -> Result<()> {
        for _ in 0..CREATES {
            let began = Instant::now();
            let id = self.conn.create(&self.image).await?;
            samples.push_ms(began.elapsed());
            self.conn.delete(&id).await?;
        }
        tokio::time::sleep(REST).await;
        Ok(())
    }

    async fn end(mut self) -> Result<()> {
        for id in self.ids {
            self.conn.delete(&id).await?;
        }
        Ok(())
    }
}

/// Two servers at once, asked in turn: what changes from one minute to the next on a machine with two processors is
/// more than what is looked for.
pub(crate) async fn one_against_many() -> Result<()> {
    let (mut few, mut many) = (Side::with(1).await?, Side::with(MANY).await?);
    let calls = [
        ("get", "/v1/sandboxes/{id}"),
        // The same answer from both; the next one is twenty times as large from the one with many.
        ("list_1", "/v1/sandboxes?pageSize=1"),
        ("list_20", "/v1/sandboxes?pageSize=20"),
        ("proxy_ping", "/v1/sandboxes/{id}/proxy/44772/ping"),
    ];
    for (name, path) in calls {
        let (mut with_few, mut with_many) = (Samples::default(), Samples::default());
        for _ in 0..count(1000) {
            few.get(&path.replace("{id}", &few.ids[0].clone()), &mut with_few).await?;
            many.get(&path.replace("{id}", &many.ids[0].clone()), &mut with_many).await?;
        }
        with_many.print(&format!("{name}_with_{MANY}"), "ms", Some(("with 1 live", with_few.p50())));
    }
    let (mut with_few, mut with_many) = (Samples::default(), Samples::default());
    for _ in 0..count(300) / CREATES {
        few.create(&mut with_few).await?;
        many.create(&mut with_many).await?;
    }
    with_many.print(&format!("create_with_{MANY}"), "ms", Some(("with 1 live", with_few.p50())));
    few.end().await?;
    many.end().await
}
