//! Uploads: whatever the pieces of the network are, the parts are the same, and written parts are read back.
#![no_main]

use arbitrary::Arbitrary;
use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use osb_execd::fuzz::{boundary, multipart};

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    sizes: Vec<u8>,
    content_type: &'a [u8],
    names: Vec<(u8, &'a [u8])>,
    body: &'a [u8],
}

fn pieces(body: &[u8], sizes: &[u8]) -> Vec<Bytes> {
    let (mut rest, mut pieces) = (body, Vec::new());
    let mut sizes = sizes.iter().cycle();
    while !rest.is_empty() {
        let size = sizes.next().map_or(rest.len(), |size| usize::from(*size).clamp(1, rest.len()));
        pieces.push(Bytes::copy_from_slice(&rest[..size]));
        rest = &rest[size..];
    }
    pieces
}

fuzz_target!(|input: Input<'_>| {
    let named = boundary(input.content_type).unwrap_or_else(|| b"b".to_vec());
    for by in [&named[..], b"b"] {
        let whole = multipart(by, pieces(input.body, &[]));
        assert_eq!(whole, multipart(by, pieces(input.body, &input.sizes)));
        assert_eq!(whole, multipart(by, pieces(input.body, &[1])));
        if let Ok(parts) = whole {
            assert!(parts.iter().map(|(_, content)| content.len()).sum::<usize>() <= input.body.len());
        }
    }
    // What is written is read back, provided that no content holds what parts them.
    let by = [b"--".as_slice(), &named].concat();
    let delimiter = [b"\r\n", by.as_slice()].concat();
    let holds = |content: &[u8]| {
        [b"\r\n", content].concat().windows(delimiter.len()).any(|window| window == delimiter)
    };
    // A line break in a boundary cannot be sent in a header.
    if named.contains(&b'\n')
        || named.contains(&b'\r')
        || input.names.iter().any(|(_, content)| holds(content))
    {
        return;
    }
    let mut body = Vec::new();
    for (name, content) in &input.names {
        body.extend_from_slice(&by);
        body.extend(format!("\r\nContent-Disposition: form-data; name=\"n{name}\"\r\n\r\n").bytes());
        body.extend_from_slice(content);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(&by);
    body.extend_from_slice(b"--\r\n");
    let expected = input
        .names
        .iter()
        .map(|(name, content)| (format!("n{name}").into_bytes(), content.to_vec()))
        .collect();
    assert_eq!(multipart(&named, pieces(&body, &input.sizes)), Ok(expected));
});
