//! What a terminal has written lately, by its number since the terminal's beginning.

use std::collections::VecDeque;

/// Output that is kept.
pub(super) const SIZE: usize = 1 << 20;
/// Most changes between standard output and standard error that are remembered.
const MOST_CHANGES: usize = 4096;

/// Which output a byte came from. A terminal has but one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    Out,
    Err,
}

/// The last [`SIZE`] bytes.
#[derive(Debug)]
pub(super) struct Ring {
    bytes: VecDeque<u8>,
    end: u64,
    /// Where output of another source begins, in order.
    changes: VecDeque<(u64, Source)>,
}

impl Ring {
    pub(super) fn new() -> Self {
        Self { bytes: VecDeque::new(), end: 0, changes: VecDeque::new() }
    }

    /// Number of the byte that comes next.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Number of the oldest byte that is kept.
    pub(super) fn start(&self) -> u64 {
        self.end - self.bytes.len() as u64
    }

    /// Adds output; the oldest makes room.
    pub(super) fn push(&mut self, source: Source, piece: &[u8]) {
        if piece.is_empty() {
            return;
        }
        if self.changes.back().is_none_or(|&(_, last)| last != source) {
            if self.changes.len() == MOST_CHANGES {
                self.changes.pop_front();
            }
            self.changes.push_back((self.end, source));
        }
        self.end += piece.len() as u64;
        let kept = &piece[piece.len().saturating_sub(SIZE)..];
        let room = SIZE - kept.len();
        self.bytes.drain(..self.bytes.len().saturating_sub(room));
        self.bytes.extend(kept);
    }

    /// Puts up to `most` bytes from `from` on behind `out` and gives the number of the first one, which is later
    /// than `from` when that is no longer kept.
    pub(super) fn read(&self, from: u64, most: usize, out: &mut Vec<u8>) -> u64 {
        let from = from.clamp(self.start(), self.end);
        // Both differences are at most SIZE.
        let skipped = usize::try_from(from - self.start()).unwrap_or(usize::MAX);
        let (first, second) = self.bytes.as_slices();
        let mut left = most;
        for (part, skip) in [(first, skipped.min(first.len())), (second, skipped.saturating_sub(first.len()))]
        {
            let part = &part[skip..];
            let part = &part[..part.len().min(left)];
            out.extend_from_slice(part);
            left -= part.len();
        }
        from
    }

    /// Where the byte of this number came from, and where output of another source begins after it.
    pub(super) fn source(&self, from: u64) -> (Source, u64) {
        let later = self.changes.partition_point(|&(start, _)| start <= from);
        let source = later.checked_sub(1).and_then(|at| self.changes.get(at));
        let next = self.changes.get(later).map_or(self.end, |&(start, _)| start);
        (source.map_or(Source::Out, |&(_, source)| source), next)
    }

    /// Forgets where output came from that lies before `from`.
    pub(super) fn forget_sources(&mut self, from: u64) {
        while self.changes.get(1).is_some_and(|&(start, _)| start <= from) {
            self.changes.pop_front();
        }
    }

    /// Whether more changes of source are close to pushing older ones out.
    pub(super) fn changes_much(&self) -> bool {
        self.changes.len() >= MOST_CHANGES / 2
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What [`Ring`] is to do, in the plainest form.
    #[derive(Default)]
    struct Model(Vec<(u8, Source)>);

    fn pieces() -> impl Strategy<Value = Vec<(bool, Vec<u8>)>> {
        let size = prop_oneof![8 => 0..2000_usize, 1 => SIZE - 3..SIZE + 3, 1 => 0..SIZE];
        let piece = (any::<bool>(), size, any::<u8>()).prop_map(|(err, size, seed)| {
            (err, (0..size).map(|at| (at as u8).wrapping_mul(31) ^ seed).collect())
        });
        proptest::collection::vec(piece, 0..12)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

        #[test]
        fn any_offset_gives_what_was_written_there(
            pieces in pieces(), from in any::<proptest::sample::Index>(), most in 0..100_000_usize,
        ) {
            let mut ring = Ring::new();
            let mut model = Model::default();
            for (err, piece) in &pieces {
                let source = if *err { Source::Err } else { Source::Out };
                ring.push(source, piece);
                model.0.extend(piece.iter().map(|&byte| (byte, source)));
            }
            let end = model.0.len();
            prop_assert_eq!(ring.end(), end as u64);
            prop_assert_eq!(ring.start(), end.saturating_sub(SIZE) as u64);
            let from = from.index(end + 1) as u64;
            let mut read = vec![0xaa];
            let first = ring.read(from, most, &mut read) as usize;
            prop_assert_eq!(first as u64, from.max(ring.start()));
            let expected: Vec<u8> = model.0[first..].iter().map(|&(byte, _)| byte).take(most).collect();
            prop_assert!(read[0] == 0xaa && read[1..] == expected[..]);
            if first < end {
                let (source, next) = ring.source(first as u64);
                prop_assert_eq!(source, model.0[first].1);
                let same = model.0[first..].iter().take_while(|&&(_, other)| other == source).count();
                prop_assert_eq!(next as usize, first + same);
            }
        }

        #[test]
        fn reading_on_from_where_the_last_read_ended_gives_everything(
            sizes in proptest::collection::vec(1..4000_usize, 1..80), step in 1..5000_usize,
        ) {
            let mut ring = Ring::new();
            let (mut written, mut read) = (Vec::new(), Vec::new());
            for size in sizes {
                let piece: Vec<u8> = (written.len()..written.len() + size).map(|at| (at % 251) as u8).collect();
                ring.push(Source::Out, &piece);
                written.extend(piece);
                let before = read.len();
                prop_assert_eq!(ring.read(before as u64, step, &mut read), before as u64);
            }
            while read.len() < written.len() {
                let at = read.len() as u64;
                ring.read(at, step, &mut read);
            }
            prop_assert!(read == written);
        }
    }

    #[test]
    fn changes_of_source_are_bounded_and_forgotten() {
        let mut ring = Ring::new();
        for number in 0..20_000 {
            ring.push(if number % 2 == 0 { Source::Out } else { Source::Err }, b"x");
        }
        assert_eq!(ring.changes.len(), MOST_CHANGES);
        assert!(ring.changes_much());
        ring.forget_sources(19_998);
        assert_eq!(ring.source(19_998), (Source::Out, 19_999));
        assert!(ring.changes.len() == 2 && !ring.changes_much());
        ring.forget_sources(u64::MAX);
        assert_eq!(ring.source(19_999), (Source::Err, 20_000));
    }
}
