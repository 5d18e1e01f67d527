//! Numbers that nobody guesses.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use uuid::Uuid;

/// A fresh id. The kernel itself is asked: depending on how the program was linked, the crate goes by way of a
/// device, and an empty root file system has none.
pub(crate) fn uuid() -> Uuid {
    let mut bytes = [0; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(more) => filled += more,
            Err(Errno::INTR) => {}
            Err(_) => return Uuid::new_v4(),
        }
    }
    uuid::Builder::from_random_bytes(bytes).into_uuid()
}
