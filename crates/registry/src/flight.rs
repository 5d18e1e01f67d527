//! Work that many want and one does.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};

use tokio::sync::Mutex;

use crate::error::{Error, Result};

/// A value that is made once. Those who come while it is made wait, and share the failure too.
///
/// The maker works inside its own future: if that is dropped, the next in line begins where the dropped one left
/// whatever it stored elsewhere.
#[derive(Debug)]
pub(crate) struct Flight<T> {
    ended: AtomicU64,
    state: Mutex<State<T>>,
}

#[derive(Debug)]
struct State<T> {
    value: Option<Arc<T>>,
    /// With the number of the attempt that it ended.
    failure: Option<(u64, Error)>,
}

impl<T> Default for Flight<T> {
    fn default() -> Self {
        Self { ended: AtomicU64::new(0), state: Mutex::new(State { value: None, failure: None }) }
    }
}

impl<T> Flight<T> {
    /// The value, made by `make` unless somebody else has or does.
    pub(crate) async fn get(&self, make: impl Future<Output = Result<T>>) -> Result<Arc<T>> {
        let seen = self.ended.load(Ordering::Acquire);
        let mut state = self.state.lock().await;
        if let Some(value) = &state.value {
            return Ok(Arc::clone(value));
        }
        match &state.failure {
            // Ended while this call waited: what failed just now is not tried again by everybody in turn.
            Some((attempt, error)) if *attempt > seen => return Err(error.clone()),
            _ => {}
        }
        match make.await {
            Ok(value) => {
                let value = Arc::new(value);
                state.value = Some(Arc::clone(&value));
                Ok(value)
            }
            Err(error) => {
                let attempt = self.ended.fetch_add(1, Ordering::Release) + 1;
                state.failure = Some((attempt, error.clone()));
                Err(error)
            }
        }
    }
}

/// Shared values by key, each kept as long as somebody holds it.
#[derive(Debug)]
pub(crate) struct Shared<K, V>(std::sync::Mutex<HashMap<K, Weak<V>>>);

impl<K, V> Default for Shared<K, V> {
    fn default() -> Self {
        Self(std::sync::Mutex::new(HashMap::new()))
    }
}

impl<K: Hash + Eq, V> Shared<K, V> {
    /// The value of `key`, new if nobody holds one.
    pub(crate) fn get(&self, key: K, new: impl FnOnce() -> V) -> Arc<V> {
        let mut values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = values.get(&key).and_then(Weak::upgrade) {
            return value;
        }
        values.retain(|_, value| value.strong_count() > 0);
        let value = Arc::new(new());
        values.insert(key, Arc::downgrade(&value));
        value
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use super::*;

    fn failure() -> Error {
        Error::Unavailable { registry: "r".into(), reason: "down".into() }
    }

    #[tokio::test]
    async fn one_makes_and_all_get() {
        let flight = Flight::default();
        let made = AtomicUsize::new(0);
        let get = || {
            flight.get(async {
                tokio::task::yield_now().await;
                Ok(made.fetch_add(1, Ordering::Relaxed))
            })
        };
        let (a, b, c) = tokio::join!(get(), get(), get());
        assert_eq!((*a.unwrap(), *b.unwrap(), *c.unwrap()), (0, 0, 0));
    }

    #[tokio::test]
    async fn failures_are_shared_by_those_who_waited_and_by_nobody_later() {
        let flight = Flight::<()>::default();
        let made = AtomicUsize::new(0);
        let get = || {
            flight.get(async {
                tokio::task::yield_now().await;
                made.fetch_add(1, Ordering::Relaxed);
                Err(failure())
            })
        };
        let (a, b) = tokio::join!(get(), get());
        assert!(a.is_err() && b.is_err());
        assert_eq!(made.load(Ordering::Relaxed), 1);
        assert!(get().await.is_err());
        assert_eq!(made.load(Ordering::Relaxed), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_takes_over_from_a_dropped_one() {
        let flight = Flight::default();
        let slow = flight.get(async {
            tokio::time::sleep(Duration::from_secs(3600)).await;
            Ok(1)
        });
        let abandoned = tokio::time::timeout(Duration::from_secs(1), slow);
        let next = flight.get(async { Ok(2) });
        let (abandoned, next) = tokio::join!(abandoned, next);
        assert!(abandoned.is_err());
        assert_eq!(*next.unwrap(), 2);
    }

    #[test]
    fn values_end_with_their_last_holder() {
        let shared = Shared::default();
        let first = shared.get("a", || 1);
        assert_eq!(*shared.get("a", || 2), 1);
        drop(first);
        assert_eq!(*shared.get("a", || 3), 3);
    }
}
