//! Lines out of bytes that come in pieces.

/// Cuts a stream of bytes into lines, however it is grouped on the way.
#[derive(Debug)]
pub(crate) struct Lines {
    buffer: Vec<u8>,
    /// Bytes of `buffer` that have been handed out.
    taken: usize,
    /// Bytes of `buffer` that hold no line end and need not be searched again.
    searched: usize,
    /// Longest line taken.
    longest: usize,
}

/// A line without end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a line of more than {0} bytes")]
pub(crate) struct TooLong(usize);

impl Lines {
    pub(crate) fn new(longest: usize) -> Self {
        Self { buffer: Vec::new(), taken: 0, searched: 0, longest }
    }

    /// Takes the next bytes.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if self.taken > 0 {
            self.buffer.drain(..self.taken);
            self.searched -= self.taken;
            self.taken = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete line without its end; `None` until more bytes come.
    pub(crate) fn next_line(&mut self) -> Result<Option<&[u8]>, TooLong> {
        match self.buffer[self.searched..].iter().position(|&b| b == b'\n') {
            Some(at) => {
                let (start, end) = (self.taken, self.searched + at);
                self.taken = end + 1;
                self.searched = self.taken;
                Ok(Some(&self.buffer[start..end]))
            }
            None => {
                self.searched = self.buffer.len();
                if self.buffer.len() - self.taken > self.longest {
                    return Err(TooLong(self.longest));
                }
                Ok(None)
            }
        }
    }

    /// What is left when the stream has ended: a last line without end.
    pub(crate) fn rest(&mut self) -> &[u8] {
        let start = self.taken;
        self.taken = self.buffer.len();
        self.searched = self.taken;
        &self.buffer[start..]
    }
}
