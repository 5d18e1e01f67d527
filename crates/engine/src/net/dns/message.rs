//! As much of a DNS message as a forwarder needs: the header and the one question. The rest passes unread.

use std::ops::Range;

/// Size of the header.
pub(super) const HEADER: usize = 12;
/// Queries longer than this are nobody's honest question.
pub(super) const LONGEST_QUERY: usize = 4096;

const RESPONSE: u8 = 0x80;
const OPCODE: u8 = 0x78;
const SERVER_FAILURE: u8 = 2;
const REFUSED: u8 = 5;
/// Types of questions whose answer is a whole zone, in more than one message.
const TRANSFERS: [u16; 2] = [251, 252];

/// A well-formed query with one question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Query {
    bytes: Vec<u8>,
    question: Range<usize>,
}

impl Query {
    /// Reads a message from a sandbox. Anything but a plain query is `None`, and gets no answer.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() > LONGEST_QUERY || bytes.get(2)? & (RESPONSE | OPCODE) != 0 {
            return None;
        }
        let question = question(bytes)?;
        Some(Self { bytes: bytes.to_vec(), question })
    }

    /// The sandbox's own transaction id.
    fn id(&self) -> [u8; 2] {
        [self.bytes[0], self.bytes[1]]
    }

    /// Is it a request for a whole zone?
    pub(super) fn is_transfer(&self) -> bool {
        let end = self.question.end;
        TRANSFERS.contains(&u16::from_be_bytes([self.bytes[end - 4], self.bytes[end - 3]]))
    }

    /// The query under another transaction id.
    pub(super) fn with_id(&self, id: [u8; 2]) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        bytes[..2].copy_from_slice(&id);
        bytes
    }

    /// Is `answer` a response to this query as sent under `id`? Some servers change the case of letters.
    pub(super) fn is_answered_by(&self, answer: &[u8], id: [u8; 2]) -> bool {
        answer.get(..2) == Some(&id[..])
            && answer.get(2).is_some_and(|flags| flags & RESPONSE != 0 && flags & OPCODE == 0)
            && question(answer)
                .is_some_and(|found| answer[found].eq_ignore_ascii_case(&self.bytes[self.question.clone()]))
    }

    /// The response as the sandbox expects it.
    pub(super) fn restore_id(&self, answer: &mut [u8]) {
        answer[..2].copy_from_slice(&self.id());
    }

    /// A response of our own that names a failure of resolution.
    pub(super) fn failure(&self) -> Vec<u8> {
        self.respond(SERVER_FAILURE)
    }

    /// A response of our own that refuses.
    pub(super) fn refusal(&self) -> Vec<u8> {
        self.respond(REFUSED)
    }

    fn respond(&self, code: u8) -> Vec<u8> {
        let mut bytes = self.bytes[..self.question.end].to_vec();
        // Response; recursion as desired and available.
        bytes[2] = RESPONSE | (self.bytes[2] & 0x01);
        bytes[3] = 0x80 | code;
        bytes[6..HEADER].fill(0);
        bytes
    }
}

/// Could another server do better than this response?
pub(super) fn is_refused_or_failed(answer: &[u8]) -> bool {
    answer.get(3).is_some_and(|flags| matches!(flags & 0x0f, SERVER_FAILURE | REFUSED))
}

/// Where the question of a message with exactly one is.
fn question(bytes: &[u8]) -> Option<Range<usize>> {
    if bytes.len() < HEADER || bytes[4..6] != [0, 1] {
        return None;
    }
    let mut at = HEADER;
    loop {
        let length = usize::from(*bytes.get(at)?);
        at += 1 + length;
        // The first name of a message has nothing to be compressed with, and at most 255 bytes.
        if length > 63 || at - HEADER > 255 {
            return None;
        }
        if length == 0 {
            break;
        }
    }
    let end = at + 4;
    (bytes.len() >= end).then_some(HEADER..end)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{any, proptest};

    use super::*;

    pub(in super::super) fn query(name: &str, kind: u16) -> Vec<u8> {
        let mut bytes = vec![0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in name.split('.') {
            bytes.push(u8::try_from(label.len()).unwrap());
            bytes.extend(label.bytes());
        }
        bytes.push(0);
        bytes.extend(kind.to_be_bytes());
        bytes.extend([0, 1]);
        bytes
    }

    #[test]
    fn a_query_keeps_its_bytes_but_the_id() {
        let mut bytes = query("example.org", 1);
        bytes.extend([0, 0, 41, 16, 0, 0, 0, 0, 0, 0, 0]);
        let parsed = Query::parse(&bytes).unwrap();
        assert!(!parsed.is_transfer());
        let sent = parsed.with_id([1, 2]);
        assert_eq!((&sent[..2], &sent[2..]), (&[1, 2][..], &bytes[2..]));
        assert!(Query::parse(&query("example.org", 252)).unwrap().is_transfer());
    }

    #[test]
    fn only_a_response_to_the_question_under_the_id_is_an_answer() {
        let parsed = Query::parse(&query("example.org", 1)).unwrap();
        let mut answer = parsed.with_id([1, 2]);
        assert!(!parsed.is_answered_by(&answer, [1, 2]), "a query is no response");
        answer[2] |= 0x80;
        assert!(parsed.is_answered_by(&answer, [1, 2]));
        assert!(!parsed.is_answered_by(&answer, [1, 3]));
        answer[13] = b'E';
        assert!(parsed.is_answered_by(&answer, [1, 2]), "case of letters");
        answer[14] = b'y';
        assert!(!parsed.is_answered_by(&answer, [1, 2]), "another name");
        let mut kind = parsed.with_id([1, 2]);
        kind[2] |= 0x80;
        let place = kind.len() - 3;
        kind[place] = 28;
        assert!(!parsed.is_answered_by(&kind, [1, 2]), "another type");
        parsed.restore_id(&mut answer);
        assert_eq!(answer[..2], [0xab, 0xcd]);
    }

    #[test]
    fn own_responses_carry_the_question_and_nothing_else() {
        let mut bytes = query("example.org", 1);
        let length = bytes.len();
        bytes[11] = 1;
        bytes.extend([0, 0, 41, 16, 0, 0, 0, 0, 0, 0, 0]);
        let failure = Query::parse(&bytes).unwrap().failure();
        assert_eq!(failure.len(), length);
        assert_eq!(failure[..HEADER], [0xab, 0xcd, 0x81, 0x82, 0, 1, 0, 0, 0, 0, 0, 0]);
        assert!(is_refused_or_failed(&failure));
        assert!(is_refused_or_failed(&Query::parse(&bytes).unwrap().refusal()));
    }

    #[test]
    fn malformed_messages_are_no_queries() {
        let good = query("example.org", 1);
        for end in 0..good.len() {
            assert_eq!(Query::parse(&good[..end]), None, "cut at {end}");
        }
        let changed = |place: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[place] = value;
            Query::parse(&bytes)
        };
        assert_eq!(changed(2, 0x81), None, "response");
        assert_eq!(changed(2, 0x29), None, "update");
        assert_eq!(changed(5, 0), None, "no question");
        assert_eq!(changed(5, 2), None, "two questions");
        assert_eq!(changed(12, 0xc0), None, "compressed");
        let long = vec!["a".repeat(60); 5].join(".");
        assert_eq!(Query::parse(&query(&long, 1)), None, "name too long");
        let mut huge = good;
        huge.resize(LONGEST_QUERY + 1, 0);
        assert_eq!(Query::parse(&huge), None);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in vec(any::<u8>(), 0..600), answer in vec(any::<u8>(), 0..600)) {
            if let Some(query) = Query::parse(&bytes) {
                query.is_transfer();
                query.failure();
                query.is_answered_by(&answer, [answer.first().copied().unwrap_or(0), 0]);
            }
            is_refused_or_failed(&answer);
        }

        #[test]
        fn nor_do_bytes_behind_a_good_header(tail in vec(any::<u8>(), 0..300)) {
            let mut bytes = vec![0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
            bytes.extend(tail);
            if let Some(query) = Query::parse(&bytes) {
                assert!(query.failure().len() <= bytes.len());
            }
        }
    }
}
