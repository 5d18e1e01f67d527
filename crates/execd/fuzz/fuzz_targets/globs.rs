//! Search patterns: they agree with the plainest reading of their grammar, and none is slow.
#![no_main]

use std::time::Duration;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use osb_execd::fuzz::Glob;

#[derive(Arbitrary, Debug, Clone, Copy, PartialEq, Eq)]
enum Letter {
    A,
    B,
    Umlaut,
    Star,
    Brace,
}

impl Letter {
    fn char(self) -> char {
        match self {
            Self::A => 'a',
            Self::B => 'b',
            Self::Umlaut => 'ü',
            Self::Star => '*',
            Self::Brace => '{',
        }
    }
}

#[derive(Arbitrary, Debug)]
enum Token {
    One(Letter),
    Any,
    Run,
    Class(bool, Letter, Letter),
    Either(Vec<Vec<Letter>>),
}

#[derive(Arbitrary, Debug)]
enum Component {
    Deep,
    Name(Vec<Token>),
}

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    pattern: Vec<Component>,
    excluded: Option<Vec<Vec<Letter>>>,
    path: Vec<Vec<Letter>>,
    raw: &'a str,
    subject: &'a [u8],
}

fn literal(out: &mut String, letter: Letter) {
    out.push('\\');
    out.push(letter.char());
}

fn write(tokens: &[Token], out: &mut String) {
    for token in tokens {
        match token {
            Token::One(letter) => literal(out, *letter),
            Token::Any => out.push('?'),
            // Two in a row must not become what crosses directories.
            Token::Run if out.ends_with('*') && !out.ends_with("\\*") => {}
            Token::Run => out.push('*'),
            Token::Class(negated, one, other) => {
                out.push_str(if *negated { "[!" } else { "[" });
                out.push(one.char());
                out.push(other.char());
                out.push(']');
            }
            Token::Either(words) => {
                out.push('{');
                for (number, word) in words.iter().enumerate() {
                    if number > 0 {
                        out.push(',');
                    }
                    word.iter().for_each(|letter| literal(out, *letter));
                }
                out.push('}');
            }
        }
    }
}

/// The plainest reading of one component.
fn name_matches(tokens: &[Token], name: &[char]) -> bool {
    let Some((first, rest)) = tokens.split_first() else { return name.is_empty() };
    let one = |holds: &dyn Fn(char) -> bool| {
        name.split_first().is_some_and(|(c, after)| holds(*c) && name_matches(rest, after))
    };
    match first {
        Token::One(letter) => one(&|c| c == letter.char()),
        Token::Any => one(&|_| true),
        Token::Run => (0..=name.len()).any(|at| name_matches(rest, &name[at..])),
        Token::Class(negated, a, b) => one(&|c| (c == a.char() || c == b.char()) != *negated),
        Token::Either(words) => {
            let empty = vec![Vec::new()];
            let words = if words.is_empty() { &empty } else { words };
            words.iter().any(|word| {
                let word: Vec<char> = word.iter().map(|letter| letter.char()).collect();
                name.strip_prefix(word.as_slice()).is_some_and(|after| name_matches(rest, after))
            })
        }
    }
}

fn path_matches(pattern: &[Component], path: &[Vec<char>], last: &dyn Fn(&[Token], &[char]) -> bool) -> bool {
    match pattern {
        [] => path.is_empty(),
        // At the end it stands for what is below, not for the directory itself.
        [Component::Deep] => !path.is_empty(),
        [Component::Deep, rest @ ..] => (0..=path.len()).any(|at| path_matches(rest, &path[at..], last)),
        [Component::Name(tokens)] => path.len() == 1 && last(tokens, &path[0]),
        [Component::Name(tokens), rest @ ..] => path
            .split_first()
            .is_some_and(|(name, after)| name_matches(tokens, name) && path_matches(rest, after, last)),
    }
}

fn agrees(input: &Input<'_>) {
    // The reference is exponential.
    let tokens =
        |component: &Component| if let Component::Name(tokens) = component { tokens.len() } else { 1 };
    let small = (1..=4).contains(&input.pattern.len())
        && input.pattern.iter().map(tokens).sum::<usize>() <= 8
        && (1..=4).contains(&input.path.len())
        && input.path.iter().all(|name| (1..=8).contains(&name.len()));
    // An empty component is no component, and an empty choice among several makes one.
    let named = input.pattern.iter().all(|component| {
        matches!(component, Component::Deep)
            || matches!(component, Component::Name(tokens) if tokens.iter().any(|token| !matches!(token, Token::Either(_))))
    });
    if !small || !named {
        return;
    }
    let mut text = String::new();
    for (number, component) in input.pattern.iter().enumerate() {
        if number > 0 {
            text.push('/');
        }
        match component {
            Component::Deep => text.push_str("**"),
            Component::Name(tokens) => {
                let mut name = String::new();
                write(tokens, &mut name);
                text.push_str(&name);
            }
        }
    }
    let mut excluded = input.excluded.as_ref().filter(|words| {
        !words.is_empty() && words.len() < 4 && matches!(input.pattern.last(), Some(Component::Name(_)))
    });
    if let Some(words) = excluded.as_mut() {
        text.push_str("!(");
        for (number, word) in words.iter().enumerate() {
            if number > 0 {
                text.push('|');
            }
            word.iter().for_each(|letter| literal(&mut text, *letter));
        }
        text.push(')');
    }
    let path: Vec<Vec<char>> =
        input.path.iter().map(|name| name.iter().map(|letter| letter.char()).collect()).collect();
    let last = |tokens: &[Token], name: &[char]| match excluded {
        None => name_matches(tokens, name),
        Some(words) => (0..=name.len()).any(|at| {
            let rest: String = name[at..].iter().collect();
            name_matches(tokens, &name[..at])
                && !words
                    .iter()
                    .any(|word| word.iter().map(|letter| letter.char()).collect::<String>() == rest)
        }),
    };
    let subject = path.iter().map(|name| name.iter().collect::<String>()).collect::<Vec<_>>().join("/");
    // Without a slash the base name counts.
    let expected = if input.pattern.len() == 1 {
        path_matches(&input.pattern, &path[path.len() - 1..], &last)
    } else {
        path_matches(&input.pattern, &path, &last)
    };
    let glob = Glob::new(&text).unwrap_or_else(|| panic!("{text} is a pattern"));
    assert_eq!(glob.matches(b"/root", subject.as_bytes()), expected, "{text} on {subject}");
}

/// What this thread has had of the processor: others may have it for long.
fn used() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fuzz_target!(|input: Input<'_>| {
    agrees(&input);
    let began = used();
    let glob = Glob::new(input.raw);
    if let Some(glob) = &glob {
        glob.matches(b"/root", input.subject);
        // Long patterns on the longest names there are.
        let name = input.subject.iter().copied().filter(|byte| *byte != b'/').cycle().take(255);
        glob.matches(b"/root", &name.collect::<Vec<u8>>());
    }
    let most = (0..4096 / input.raw.len().max(1)).map(|_| input.raw).collect::<String>();
    if let Some(glob) = Glob::new(&most) {
        glob.matches(b"/root", &[b'a'; 255]);
    }
    let took = used() - began;
    assert!(took < Duration::from_secs(10), "{took:?} {}", input.raw);
});
