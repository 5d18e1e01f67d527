//! Output of programs: in whatever pieces it comes, the texts joined are the output, in both forms of line ends.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use osb_execd::stream::event::{self, Source};
use osb_execd::stream::lines::LineSplitter;
use osb_protocol::boot::LineEndings;

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    cuts: Vec<(u8, bool)>,
    repeated: u16,
    output: &'a [u8],
}

fn lossy(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(std::iter::repeat_n('\u{fffd}', chunk.invalid().len()));
    }
    text
}

fn texts(output: &[u8], cuts: &[(u8, bool)], ends: LineEndings) -> Vec<String> {
    let mut lines = LineSplitter::new(Source::Stderr, ends);
    let suffix = event::suffix(1);
    let (mut rest, mut out) = (output, Vec::new());
    let mut cuts = cuts.iter().cycle();
    while !rest.is_empty() {
        let (size, idle) =
            cuts.next().copied().map_or((rest.len(), true), |(size, idle)| (usize::from(size), idle));
        let (piece, after) = rest.split_at(size.clamp(1, rest.len()));
        lines.push(piece, &suffix, &mut out);
        if idle {
            lines.idle(&suffix, &mut out);
        }
        rest = after;
    }
    lines.finish(&suffix, &mut out);
    let out = String::from_utf8(out).expect("JSON");
    let event = |text: &str| serde_json::from_str::<osb_protocol::execd::Event>(text).expect("an event").text;
    out.split_terminator("\n\n").map(|text| event(text).expect("a text")).collect()
}

fn stripped(text: &str) -> Vec<String> {
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    let ends = text.ends_with('\n');
    let mut lines: Vec<String> = text.split('\n').map(str::to_owned).collect();
    if ends || text.is_empty() {
        lines.pop();
    }
    lines.into_iter().map(|line| if line.is_empty() { "\n".to_owned() } else { line }).collect()
}

fuzz_target!(|input: Input<'_>| {
    let decoded = lossy(input.output);
    for cuts in [&input.cuts[..], &[], &[(1, true)], &[(1, false)]] {
        assert_eq!(texts(input.output, cuts, LineEndings::Keep).concat(), decoded);
        assert_eq!(texts(input.output, cuts, LineEndings::Strip), stripped(&decoded));
    }
    // Very long lines, rarely: they cost time.
    if input.repeated > 65_000 && !input.output.is_empty() {
        let long: Vec<u8> = input.output.iter().copied().cycle().take((1 << 20) + 4096).collect();
        assert_eq!(texts(&long, &[(255, false)], LineEndings::Keep).concat(), lossy(&long));
    }
});
