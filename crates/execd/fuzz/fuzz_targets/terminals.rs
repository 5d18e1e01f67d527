//! Terminals: frames in any pieces mean the same, text frames mean what their JSON says.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use osb_execd::fuzz::{Asked, terminal_bytes, terminal_connection, terminal_text};
use serde_json::Value;

#[derive(Arbitrary, Debug)]
enum Frame<'a> {
    Raw(&'a [u8]),
    Whole { first: u8, mask: [u8; 4], payload: &'a [u8] },
    Text(&'a str),
    Data(&'a str),
    Input(&'a [u8]),
}

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    sizes: &'a [u8],
    frames: Vec<Frame<'a>>,
}

fn frame(first: u8, mask: [u8; 4], payload: &[u8], out: &mut Vec<u8>) {
    out.push(first);
    match u16::try_from(payload.len()) {
        Ok(length @ ..126) => out.push(0x80 | length as u8),
        Ok(length) => {
            out.push(0x80 | 126);
            out.extend(length.to_be_bytes());
        }
        Err(_) => {
            out.push(0x80 | 127);
            out.extend((payload.len() as u64).to_be_bytes());
        }
    }
    out.extend(mask);
    out.extend(payload.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask));
}

/// What a text frame means, as its JSON is read by others.
fn meaning(text: &str) -> Option<Asked> {
    let Value::Object(members) = serde_json::from_str(text).ok()? else { return None };
    let small = |name: &str| members.get(name).and_then(Value::as_u64).and_then(|n| u16::try_from(n).ok());
    Some(match members.get("type")?.as_str()? {
        "stdin" => Asked::Stdin(members.get("data").and_then(Value::as_str).unwrap_or_default().into()),
        "resize" => Asked::Resize(small("cols").filter(|n| *n > 0)?, small("rows").filter(|n| *n > 0)?),
        "signal" => {
            let name = members.get("signal").and_then(Value::as_str);
            let known = [("SIGINT", 2), ("SIGQUIT", 3), ("SIGKILL", 9), ("SIGTERM", 15), ("SIGHUP", 1)];
            Asked::Signal(known.iter().find(|(other, _)| Some(*other) == name).map(|(_, number)| *number))
        }
        "ping" => Asked::Ping,
        _ => return None,
    })
}

fn check(text: &str) {
    match terminal_text(text) {
        Asked::Bad => {}
        asked => assert_eq!(Some(asked), meaning(text), "{text}"),
    }
}

fuzz_target!(|input: Input<'_>| {
    let mut bytes = Vec::new();
    // What must come out, as long as all frames are good ones.
    let mut expected = Some(Vec::new());
    for piece in &input.frames {
        let (first, mask, payload) = match piece {
            Frame::Raw(raw) => {
                bytes.extend_from_slice(raw);
                expected = None;
                continue;
            }
            Frame::Whole { first, mask, payload } => {
                expected = None;
                (*first, *mask, payload.to_vec())
            }
            Frame::Text(text) => {
                check(text);
                if let Some(expected) = &mut expected {
                    expected.push(terminal_text(text));
                }
                (0x81, [1, 2, 3, 4], text.as_bytes().to_vec())
            }
            Frame::Data(data) => {
                let text = serde_json::json!({ "type": "stdin", "data": data }).to_string();
                if let Some(expected) = &mut expected {
                    expected.push(Asked::Stdin(data.as_bytes().to_vec()));
                }
                (0x81, [9, 8, 7, 6], text.into_bytes())
            }
            Frame::Input(typed) => {
                let frame = [&[0], *typed].concat();
                assert_eq!(terminal_bytes(&frame), Asked::Stdin(typed.to_vec()));
                if let Some(expected) = &mut expected {
                    expected.push(Asked::Stdin(typed.to_vec()));
                }
                (0x82, [0xff, 0, 0x55, 0xaa], frame)
            }
        };
        frame(first, mask, &payload, &mut bytes);
    }
    let whole = terminal_connection(&bytes, &[255]);
    if let Some(expected) = expected {
        assert_eq!(whole, (expected, String::new()));
    }
    assert_eq!(whole, terminal_connection(&bytes, input.sizes));
    assert_eq!(whole, terminal_connection(&bytes, &[1]));
});
