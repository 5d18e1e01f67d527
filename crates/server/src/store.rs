//! The truth about sandboxes: one SQLite file, written by one task.
//!
//! Writes that arrive while another is under way go into one transaction together, so that many creates at once
//! cost one commit. A write is durable against the end of this process when its call returns, and against a power
//! cut a moment later; no sandbox outlives a power cut either.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use osb_protocol::lifecycle::SandboxState;
use osb_protocol::time::WireTime;
use osb_runtime::Handle;
use rustix::fs::{FlockOperation, flock};
use sqlx::sqlite::{
    SqliteArguments, SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteRow, SqliteSynchronous,
};
use sqlx::{ConnectOptions, Connection, Row as _};
use tokio::sync::{mpsc, oneshot};

use crate::sandbox::{Changing, Origin, Status};

/// Writes after which the log is copied back into the file.
const CHECKPOINT_EVERY: usize = 1000;
/// Most writes of one transaction.
const BATCH: usize = 256;
/// Longest path that SQLite opens, less what it appends for its side files.
const LONGEST_PATH: usize = 500;

const INSERT: &str = "INSERT INTO sandboxes (id, created_at, image, platform, entrypoint, extensions, limits, \
     endpoint_token, handle, metadata, expires_at, state, reason, message, since, exit_code) \
     VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";
const UPDATE: &str = "UPDATE sandboxes SET metadata = ?, expires_at = ?, state = ?, reason = ?, message = ?, \
     since = ?, exit_code = ? WHERE id = ?";
const DELETE: &str = "DELETE FROM sandboxes WHERE id = ?";
const LOAD: &str = "SELECT * FROM sandboxes ORDER BY created_at, id";

/// Why the store could not do what was asked.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// Another server works on the file.
    #[error("{0} is in use by another server: stop it, or give this one another data_dir")]
    Locked(PathBuf),
    /// The path cannot be opened.
    #[error("the path of data_dir is too long: shorten it by {0} bytes")]
    TooLong(usize),
    /// The disk has no room left.
    #[error("the disk of data_dir is full: make room on it and try again")]
    Full,
    /// The file or its directory cannot be used.
    #[error("{path}: {reason}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// SQLite failed.
    #[error("store: {0}")]
    Sql(String),
    /// A stored row does not make sense.
    #[error("store: sandbox {id} has an unreadable {column}")]
    Row {
        /// Which row.
        id: String,
        /// Which column.
        column: &'static str,
    },
    /// The writer has stopped.
    #[error("store: closed")]
    Closed,
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        /// `SQLITE_FULL`.
        const FULL: &str = "13";
        match error.as_database_error().and_then(sqlx::error::DatabaseError::code) {
            Some(code) if code == FULL => Self::Full,
            _ => Self::Sql(error.to_string()),
        }
    }
}

type Reply = oneshot::Sender<Result<(), StoreError>>;

/// A stored sandbox.
#[derive(Debug)]
pub struct Row {
    /// What was fixed when it was made.
    pub origin: Origin,
    /// What the runtime wants back after a restart.
    pub handle: Handle,
    /// What changes over its life.
    pub changing: Changing,
}

/// One write, ready to be executed.
struct Write {
    sql: &'static str,
    arguments: SqliteArguments,
    reply: Option<Reply>,
}

/// The store. Cloning is cheap.
#[derive(Debug, Clone)]
pub struct Store {
    writes: mpsc::UnboundedSender<Write>,
    /// Held as long as anybody can write.
    _lock: Arc<File>,
}

impl Store {
    /// Opens or makes the file and reads all sandboxes.
    ///
    /// # Errors
    /// When another server holds the file, or it cannot be used.
    pub async fn open(path: &Path) -> Result<(Self, Vec<Row>), StoreError> {
        if path.as_os_str().len() > LONGEST_PATH {
            return Err(StoreError::TooLong(path.as_os_str().len() - LONGEST_PATH));
        }
        let lock = prepare(path)?;
        let options = SqliteConnectOptions::new()
            .filename(path)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Normal)
            .busy_timeout(Duration::from_secs(5))
            // The log is copied back by a second connection, so that no write waits for the disk.
            .pragma("wal_autocheckpoint", "0")
            .disable_statement_logging();
        let (connection, sandboxes) = connect(options.clone()).await?;
        let (writes, queue) = mpsc::unbounded_channel();
        tokio::spawn(write_all(connection, queue, options));
        Ok((Self { writes, _lock: Arc::new(lock) }, sandboxes))
    }

    /// Adds a sandbox.
    ///
    /// # Errors
    /// The file cannot be written.
    pub async fn insert(
        &self,
        origin: &Origin,
        handle: &Handle,
        changing: &Changing,
    ) -> Result<(), StoreError> {
        let mut arguments = Bind::default();
        arguments
            .text(origin.id.to_string())
            .int(Some(origin.created_at.as_micros()))
            .text(origin.image.clone())
            .maybe(origin.platform.as_ref().map(json))
            .text(json(&origin.entrypoint))
            .text(json(&origin.extensions))
            .text(json(&origin.limits))
            .maybe(origin.endpoint_token.clone())
            .text(json(handle))
            .changing(changing);
        self.write(INSERT, arguments).await
    }

    /// Writes what changes of a sandbox.
    ///
    /// # Errors
    /// The file cannot be written.
    pub async fn update(
        &self,
        id: osb_protocol::ids::SandboxId,
        changing: &Changing,
    ) -> Result<(), StoreError> {
        let mut arguments = Bind::default();
        arguments.changing(changing).text(id.to_string());
        self.write(UPDATE, arguments).await
    }

    /// Takes a sandbox out. An unknown one is no error.
    ///
    /// # Errors
    /// The file cannot be written.
    pub async fn delete(&self, id: osb_protocol::ids::SandboxId) -> Result<(), StoreError> {
        let mut arguments = Bind::default();
        arguments.text(id.to_string());
        self.write(DELETE, arguments).await
    }

    async fn write(&self, sql: &'static str, arguments: Bind) -> Result<(), StoreError> {
        if let Some(error) = arguments.failed {
            return Err(StoreError::Sql(error));
        }
        let (reply, answer) = oneshot::channel();
        let write = Write { sql, arguments: arguments.list, reply: Some(reply) };
        self.writes.send(write).map_err(|_| StoreError::Closed)?;
        answer.await.map_err(|_| StoreError::Closed)?
    }
}

/// Opens the file, brings its schema up to date and reads it. Boxed, so that callers may move between threads: the
/// compiler cannot prove it through the migrator's own future.
fn connect(
    options: SqliteConnectOptions,
) -> BoxFuture<'static, Result<(SqliteConnection, Vec<Row>), StoreError>> {
    Box::pin(async move {
        let mut connection = options.connect().await?;
        sqlx::migrate!("./migrations")
            .run_direct(None, &mut connection, false)
            .await
            .map_err(|error| StoreError::Sql(error.to_string()))?;
        let rows = sqlx::query(LOAD).fetch_all(&mut connection).await?;
        let mut sandboxes = Vec::with_capacity(rows.len());
        for row in &rows {
            match read_row(row) {
                Ok(sandbox) => sandboxes.push(sandbox),
                Err(StoreError::Row { id, column }) => {
                    // One damaged row must not keep all others from being served. The runtime removes what no row
                    // names.
                    tracing::error!(sandbox = id, column, "stored sandbox cannot be read: it is given up");
                    sqlx::query(DELETE).bind(id).execute(&mut connection).await?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok((connection, sandboxes))
    })
}

/// Makes directory and file for their owner alone, and locks.
fn prepare(path: &Path) -> Result<File, StoreError> {
    let failed =
        |path: &Path, error: io::Error| StoreError::Io { path: path.to_owned(), reason: error.to_string() };
    if let Some(directory) = path.parent().filter(|d| !d.as_os_str().is_empty()) {
        std::fs::create_dir_all(directory).map_err(|error| failed(directory, error))?;
    }
    let open = |path: &Path| {
        let mut options = std::fs::OpenOptions::new();
        options
            .read(true)
            .append(true)
            .create(true)
            .mode(0o600)
            .open(path)
            .map_err(|error| failed(path, error))
    };
    let mut lock_path = path.as_os_str().to_owned();
    lock_path.push(".lock");
    let lock = open(Path::new(&lock_path))?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive)
        .map_err(|_| StoreError::Locked(path.to_owned()))?;
    // SQLite gives its side files the mode of the main file.
    open(path)?;
    Ok(lock)
}

/// Executes writes in order until nobody can send any more.
async fn write_all(
    mut connection: SqliteConnection,
    mut queue: mpsc::UnboundedReceiver<Write>,
    options: SqliteConnectOptions,
) {
    let mut batch = Vec::with_capacity(BATCH);
    let mut since_checkpoint = 0;
    let mut checkpoint: Option<tokio::task::JoinHandle<()>> = None;
    while queue.recv_many(&mut batch, BATCH).await > 0 {
        since_checkpoint += batch.len();
        execute(&mut connection, &mut batch).await;
        batch.clear();
        if since_checkpoint >= CHECKPOINT_EVERY
            && checkpoint.as_ref().is_none_or(tokio::task::JoinHandle::is_finished)
        {
            since_checkpoint = 0;
            let options = options.clone();
            checkpoint = Some(tokio::spawn(async move {
                if let Err(error) = copy_back(&options).await {
                    tracing::warn!(%error, "store: log could not be copied back; it is tried again");
                }
            }));
        }
    }
    if let Some(task) = checkpoint {
        let _ = task.await;
    }
    if let Err(error) = connection.close().await {
        tracing::warn!(%error, "store: closing failed");
    }
}

async fn copy_back(options: &SqliteConnectOptions) -> Result<(), sqlx::Error> {
    let mut connection = options.connect().await?;
    sqlx::query("PRAGMA wal_checkpoint(PASSIVE)").execute(&mut connection).await?;
    connection.close().await
}

async fn execute(connection: &mut SqliteConnection, batch: &mut [Write]) {
    if batch.len() > 1 && together(connection, batch).await.is_ok() {
        for write in batch {
            answer(write, Ok(()));
        }
        return;
    }
    // Alone, or after the transaction failed: each for itself, so that one bad write fails alone.
    for write in batch {
        let done = run(connection, write).await;
        answer(write, done.map_err(StoreError::from));
    }
}

async fn together(connection: &mut SqliteConnection, batch: &[Write]) -> Result<(), sqlx::Error> {
    let mut transaction = connection.begin().await?;
    for write in batch {
        run(&mut transaction, write).await?;
    }
    transaction.commit().await
}

async fn run(connection: &mut SqliteConnection, write: &Write) -> Result<(), sqlx::Error> {
    sqlx::query_with(write.sql, write.arguments.clone()).execute(connection).await.map(|_| ())
}

fn answer(write: &mut Write, result: Result<(), StoreError>) {
    if let Some(reply) = write.reply.take() {
        // Whoever asked may have gone; the write counts all the same.
        let _ = reply.send(result);
    }
}

/// Collects the arguments of a statement.
#[derive(Default)]
struct Bind {
    list: SqliteArguments,
    failed: Option<String>,
}

impl Bind {
    fn text(&mut self, value: String) -> &mut Self {
        self.maybe(Some(value))
    }

    fn maybe(&mut self, value: Option<String>) -> &mut Self {
        if let Err(error) = sqlx::Arguments::add(&mut self.list, value) {
            self.failed = Some(error.to_string());
        }
        self
    }

    fn int(&mut self, value: Option<i64>) -> &mut Self {
        if let Err(error) = sqlx::Arguments::add(&mut self.list, value) {
            self.failed = Some(error.to_string());
        }
        self
    }

    fn changing(&mut self, changing: &Changing) -> &mut Self {
        let status = &changing.status;
        self.text(json(&changing.metadata))
            .int(changing.expires_at.map(WireTime::as_micros))
            .text(status.state.as_str().to_owned())
            .text(status.reason.clone())
            .text(status.message.clone())
            .int(Some(status.since.as_micros()))
            .int(status.exit_code.map(i64::from))
    }
}

fn json<T: serde::Serialize>(value: &T) -> String {
    // Maps and lists of text, and JSON itself: nothing of them fails to serialise.
    serde_json::to_string(value).unwrap_or_default()
}

fn read_row(row: &SqliteRow) -> Result<Row, StoreError> {
    let id: String = row.try_get("id")?;
    let broken = |column| StoreError::Row { id: id.clone(), column };
    let time = |column| -> Result<Option<WireTime>, StoreError> {
        match row.try_get::<Option<i64>, _>(column)? {
            Some(micros) => WireTime::from_micros(micros).map(Some).ok_or_else(|| broken(column)),
            None => Ok(None),
        }
    };
    let origin = Origin {
        id: id.parse().map_err(|_| broken("id"))?,
        created_at: time("created_at")?.ok_or_else(|| broken("created_at"))?,
        image: row.try_get("image")?,
        platform: match row.try_get::<Option<String>, _>("platform")? {
            Some(text) => Some(parse(&text).ok_or_else(|| broken("platform"))?),
            None => None,
        },
        entrypoint: column(row, "entrypoint")?.ok_or_else(|| broken("entrypoint"))?,
        extensions: column(row, "extensions")?.ok_or_else(|| broken("extensions"))?,
        limits: column(row, "limits")?.ok_or_else(|| broken("limits"))?,
        endpoint_token: row.try_get("endpoint_token")?,
    };
    // One that cannot be read finds nothing, and the sandbox is told as lost.
    let handle = column(row, "handle")?.unwrap_or(Handle(serde_json::Value::Null));
    let changing = Changing {
        status: Status {
            state: SandboxState::from(row.try_get::<&str, _>("state")?),
            reason: row.try_get("reason")?,
            message: row.try_get("message")?,
            since: time("since")?.ok_or_else(|| broken("since"))?,
            exit_code: row.try_get("exit_code")?,
        },
        metadata: column(row, "metadata")?.ok_or_else(|| broken("metadata"))?,
        expires_at: time("expires_at")?,
        gone: false,
    };
    Ok(Row { origin, handle, changing })
}

fn column<T: serde::de::DeserializeOwned>(
    row: &SqliteRow,
    name: &'static str,
) -> Result<Option<T>, StoreError> {
    Ok(parse(row.try_get::<&str, _>(name)?))
}

fn parse<T: serde::de::DeserializeOwned>(text: &str) -> Option<T> {
    serde_json::from_str(text).ok()
}
