//! The terminals there are.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::StatusCode;
use osb_protocol::execd::code;

use super::terminal::Terminal;
use crate::http::ApiError;

/// How many there may be: each keeps up to a mebibyte of output, and commonly a shell.
const MOST: usize = 64;
/// One that was made and not used for so long may make room for another.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// All terminals.
#[derive(Debug, Default)]
pub struct Registry(Mutex<HashMap<String, Arc<Terminal>>>);

impl Registry {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Terminal>>> {
        // Every holder leaves the map whole between its statements.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, id: &str) -> Option<Arc<Terminal>> {
        self.lock().get(id).filter(|terminal| !terminal.gone.is_cancelled()).cloned()
    }

    /// Makes a terminal known. When there are too many, one whose program has ended gives way.
    pub(super) fn insert(&self, terminal: Arc<Terminal>) -> Result<(), ApiError> {
        let mut all = self.lock();
        if all.len() >= MOST {
            let now = Instant::now();
            let ended = all.iter().filter_map(|(id, terminal)| {
                let (was_used, since) = terminal.idle_since()?;
                (was_used || now.duration_since(since) > FORGOTTEN).then_some((since, id))
            });
            let Some(oldest) = ended.min().map(|(_, id)| id.clone()) else {
                let message = format!("{MOST} terminals are open; delete one that is not needed");
                return Err(ApiError::new(
                    StatusCode::SERVICE_UNAVAILABLE,
                    code::SERVICE_UNAVAILABLE,
                    message,
                ));
            };
            if let Some(oldest) = all.remove(&oldest) {
                oldest.gone.cancel();
            }
        }
        all.insert(terminal.id.clone(), terminal);
        Ok(())
    }

    /// Ends a terminal and all its processes; `false` when there is none of that id. It stays known until they are
    /// gone. Not cancel safe.
    pub(super) async fn delete(&self, id: &str) -> Result<bool, ApiError> {
        let Some(terminal) = self.lock().get(id).cloned() else { return Ok(false) };
        terminal.close().await?;
        self.lock().remove(id);
        Ok(true)
    }

    /// Ends all terminals.
    pub async fn close_all(&self) {
        let all = std::mem::take(&mut *self.lock());
        for terminal in all.values() {
            terminal.gone.cancel();
        }
        for terminal in all.values() {
            // Nobody is left to be told.
            let _ = terminal.close().await;
        }
    }
}
