//! Search patterns.
//!
//! `?` one character, `*` any run, `**` any directories including none, `[a-z]`, `[!a-z]`, `{a,b}`, `\` before a
//! character that shall stand for itself, and one `!(a|b)` in the last component. Nothing but `**` crosses a slash.
//! A pattern without a slash is matched against the base name, one that begins with a slash against the whole
//! path, any other against the path relative to the root of the search.
//!
//! The pattern is compiled to a small automaton that looks at each character once, so no pattern is slow. Regular
//! expressions over bytes, which the usual crate builds, would make `?` half of an `ü`.

use std::borrow::Cow;

/// Longer patterns are refused.
const MAX_LENGTH: usize = 4096;
/// Braces nest no deeper.
const MAX_NESTING: usize = 32;

/// Why a pattern is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadPattern {
    #[error("the pattern is longer than {MAX_LENGTH} bytes")]
    TooLong,
    #[error("the pattern nests braces more than {MAX_NESTING} deep")]
    TooDeep,
    #[error("the pattern has '[' without ']'; write \\[ for a bracket that stands for itself")]
    OpenClass,
    #[error("the pattern has a range whose end comes before its start")]
    ReversedRange,
    #[error("the pattern has '{{' without '}}'; write \\{{ for a brace that stands for itself")]
    OpenBrace,
    #[error("the pattern has '!(' without ')'; write \\! for a mark that stands for itself")]
    OpenExclusion,
    #[error("the pattern may have one !(…), in its last component and outside braces")]
    MisplacedExclusion,
    #[error("the pattern ends in a single '\\'")]
    TrailingBackslash,
}

/// What a pattern is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Subject {
    BaseName,
    Relative,
    Absolute,
}

/// A compiled pattern.
#[derive(Debug)]
pub(crate) struct Pattern {
    subject: Subject,
    whole: Program,
    exclusion: Option<Exclusion>,
}

/// `before!(inner)after` in the last component.
#[derive(Debug)]
struct Exclusion {
    before: Program,
    inner: Program,
    after: Program,
}

impl Pattern {
    /// Compiles a pattern; an empty one is `**`.
    pub(crate) fn new(text: &str) -> Result<Self, BadPattern> {
        if text.len() > MAX_LENGTH {
            return Err(BadPattern::TooLong);
        }
        let text = if text.is_empty() { "**" } else { text };
        let chars: Vec<char> = text.chars().collect();
        let subject = match chars.first() {
            Some('/') => Subject::Absolute,
            _ if has_slash(&chars) => Subject::Relative,
            _ => Subject::BaseName,
        };
        let Some((start, end)) = find_exclusion(&chars)? else {
            return Ok(Self { subject, whole: Program::compile(&chars, &[])?, exclusion: None });
        };
        let (component, inner, after) = (&chars[..start], &chars[start + 2..end], &chars[end + 1..]);
        if has_slash(inner) || has_slash(after) {
            return Err(BadPattern::MisplacedExclusion);
        }
        let component_start = component.iter().rposition(|c| *c == '/').map_or(0, |slash| slash + 1);
        // With the group widened to `*` the pattern says where; the three parts then say which names. The empty
        // braces keep it from becoming `**` with a star beside it.
        let widened: Vec<char> =
            component.iter().chain(&['{', '}', '*', '{', '}']).chain(after).copied().collect();
        Ok(Self {
            subject,
            whole: Program::compile(&widened, &[])?,
            exclusion: Some(Exclusion {
                before: Program::compile(&component[component_start..], &[])?,
                inner: Program::compile(inner, &['|'])?,
                after: Program::compile(after, &[])?,
            }),
        })
    }

    /// Whether an entry matches. `relative` is its path below the root, `root` the root's absolute path.
    pub(crate) fn matches(&self, root: &[u8], relative: &[u8]) -> bool {
        let base = relative.rsplit(|byte| *byte == b'/').next().unwrap_or(relative);
        let subject: Cow<'_, str> = match self.subject {
            Subject::BaseName => String::from_utf8_lossy(base),
            Subject::Relative => String::from_utf8_lossy(relative),
            Subject::Absolute => {
                let root = root.strip_suffix(b"/").unwrap_or(root);
                String::from_utf8_lossy(&[root, b"/", relative].concat()).into_owned().into()
            }
        };
        self.whole.matches(subject.chars())
            && self
                .exclusion
                .as_ref()
                .is_none_or(|exclusion| exclusion.matches(&String::from_utf8_lossy(base)))
    }
}

impl Exclusion {
    /// Whether the name can be cut so that the middle is not one of the excluded.
    fn matches(&self, name: &str) -> bool {
        let name: Vec<char> = name.chars().collect();
        let before = self.before.prefixes(&name);
        let cuts = 0..=name.len();
        let after: Vec<bool> =
            cuts.clone().map(|end| self.after.matches(name[end..].iter().copied())).collect();
        cuts.filter(|start| before[*start]).any(|start| {
            let inner = self.inner.prefixes(&name[start..]);
            inner.iter().zip(&after[start..]).any(|(excluded, ends)| *ends && !excluded)
        })
    }
}

fn has_slash(chars: &[char]) -> bool {
    chars.contains(&'/')
}

/// Start and end of the `!(…)`, if there is one.
fn find_exclusion(chars: &[char]) -> Result<Option<(usize, usize)>, BadPattern> {
    let (mut at, mut braces, mut found) = (0, 0_usize, None);
    while at < chars.len() {
        match chars[at] {
            '\\' => at += 1,
            '[' => at = class_end(chars, at)?,
            '{' => braces += 1,
            '}' => braces = braces.saturating_sub(1),
            '!' if chars.get(at + 1) == Some(&'(') => {
                if braces > 0 || found.is_some() {
                    return Err(BadPattern::MisplacedExclusion);
                }
                let end = exclusion_end(chars, at + 2)?;
                found = Some((at, end));
                at = end;
            }
            _ => {}
        }
        at += 1;
    }
    Ok(found)
}

fn exclusion_end(chars: &[char], mut at: usize) -> Result<usize, BadPattern> {
    while at < chars.len() {
        match chars[at] {
            '\\' => at += 1,
            '[' => at = class_end(chars, at)?,
            '!' if chars.get(at + 1) == Some(&'(') => return Err(BadPattern::MisplacedExclusion),
            ')' => return Ok(at),
            _ => {}
        }
        at += 1;
    }
    Err(BadPattern::OpenExclusion)
}

/// Index of the `]` that closes the class opened at `open`.
fn class_end(chars: &[char], open: usize) -> Result<usize, BadPattern> {
    let mut at = open + 1;
    if matches!(chars.get(at), Some('!' | '^')) {
        at += 1;
    }
    // A bracket in the first place is a member.
    let first = at;
    while let Some(c) = chars.get(at) {
        match c {
            '\\' => at += 1,
            ']' if at > first => return Ok(at),
            _ => {}
        }
        at += 1;
    }
    Err(BadPattern::OpenClass)
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Op {
    Char(char),
    /// Any character but a slash.
    NotSlash,
    Anything,
    Class {
        negated: bool,
        ranges: Vec<(char, char)>,
    },
    Split(usize, usize),
    Jump(usize),
    Fail,
}

/// An automaton; its end is the end of the list.
#[derive(Debug)]
struct Program {
    ops: Vec<Op>,
}

impl Program {
    /// Compiles all of `chars`, with alternatives at the top parted by `separators`.
    fn compile(chars: &[char], separators: &[char]) -> Result<Self, BadPattern> {
        let mut compiler = Compiler { chars, at: 0, ops: Vec::new() };
        if separators.is_empty() {
            compiler.sequence(&[], 0)?;
        } else {
            compiler.alternatives(separators[0], None, 0)?;
        }
        Ok(Self { ops: compiler.ops })
    }

    fn matches(&self, subject: impl Iterator<Item = char>) -> bool {
        let mut whole = false;
        self.run(subject, |matches| whole = matches);
        whole
    }

    /// For each length of a prefix, none included, whether it matches.
    fn prefixes(&self, subject: &[char]) -> Vec<bool> {
        let mut found = Vec::with_capacity(subject.len() + 1);
        self.run(subject.iter().copied(), |matches| found.push(matches));
        found.resize(subject.len() + 1, false);
        found
    }

    /// Says before the first character and after each one whether what came so far matches. Once nothing more can,
    /// the last word is no.
    fn run(&self, subject: impl Iterator<Item = char>, mut say: impl FnMut(bool)) {
        let mut threads = Threads::new(self.ops.len() + 1);
        let mut next = Threads::new(self.ops.len() + 1);
        self.follow(0, &mut threads);
        say(threads.seen[self.ops.len()]);
        for c in subject {
            next.clear();
            for at in &threads.list {
                let steps = match self.ops.get(*at) {
                    Some(Op::Char(expected)) => *expected == c,
                    Some(Op::NotSlash) => c != '/',
                    Some(Op::Anything) => true,
                    Some(Op::Class { negated, ranges }) => {
                        c != '/' && ranges.iter().any(|(low, high)| (*low..=*high).contains(&c)) != *negated
                    }
                    Some(Op::Split(..) | Op::Jump(_) | Op::Fail) | None => false,
                };
                if steps {
                    self.follow(at + 1, &mut next);
                }
            }
            std::mem::swap(&mut threads, &mut next);
            say(threads.seen[self.ops.len()]);
            if threads.list.is_empty() {
                return;
            }
        }
    }

    /// Adds the thread at `start` and all it reaches without a character.
    fn follow(&self, start: usize, threads: &mut Threads) {
        let mut open = vec![start];
        while let Some(at) = open.pop() {
            if std::mem::replace(&mut threads.seen[at], true) {
                continue;
            }
            threads.list.push(at);
            match self.ops.get(at) {
                Some(Op::Split(one, other)) => open.extend([*one, *other]),
                Some(Op::Jump(to)) => open.push(*to),
                _ => {}
            }
        }
    }
}

struct Threads {
    list: Vec<usize>,
    seen: Vec<bool>,
}

impl Threads {
    fn new(size: usize) -> Self {
        Self { list: Vec::new(), seen: vec![false; size] }
    }

    fn clear(&mut self) {
        for at in self.list.drain(..) {
            self.seen[at] = false;
        }
    }
}

struct Compiler<'a> {
    chars: &'a [char],
    at: usize,
    ops: Vec<Op>,
}

impl Compiler<'_> {
    /// Compiles up to one of `stops`, which is left, or the end.
    fn sequence(&mut self, stops: &[char], depth: usize) -> Result<(), BadPattern> {
        let start = self.at;
        while let Some(&c) = self.chars.get(self.at) {
            if stops.contains(&c) {
                return Ok(());
            }
            let at_component = self.at == start || self.chars[self.at - 1] == '/';
            self.at += 1;
            match c {
                '\\' => {
                    let literal = *self.chars.get(self.at).ok_or(BadPattern::TrailingBackslash)?;
                    self.at += 1;
                    self.ops.push(Op::Char(literal));
                }
                '?' => self.ops.push(Op::NotSlash),
                '*' => self.star(at_component, stops),
                '[' => self.class()?,
                '{' => {
                    if depth == MAX_NESTING {
                        return Err(BadPattern::TooDeep);
                    }
                    self.alternatives(',', Some('}'), depth + 1)?;
                }
                c => self.ops.push(Op::Char(c)),
            }
        }
        Ok(())
    }

    /// A run of stars, the first of which is read.
    fn star(&mut self, at_component: bool, stops: &[char]) {
        let start = self.at;
        while self.chars.get(self.at) == Some(&'*') {
            self.at += 1;
        }
        let next = self.chars.get(self.at);
        let whole_component =
            at_component && self.at > start && next.is_none_or(|c| *c == '/' || stops.contains(c));
        if !whole_component {
            self.repeat(Op::NotSlash);
        } else if next == Some(&'/') {
            // Any number of whole components, each with its slash, or none.
            self.at += 1;
            let split = self.ops.len();
            self.ops.push(Op::Fail);
            self.repeat(Op::Anything);
            self.ops.push(Op::Char('/'));
            self.ops[split] = Op::Split(split + 1, self.ops.len());
        } else {
            self.repeat(Op::Anything);
        }
    }

    fn repeat(&mut self, op: Op) {
        let start = self.ops.len();
        self.ops.extend([Op::Split(start + 1, start + 3), op, Op::Jump(start)]);
    }

    /// A class whose `[` is read.
    fn class(&mut self) -> Result<(), BadPattern> {
        let end = class_end(self.chars, self.at - 1)?;
        let negated = matches!(self.chars[self.at], '!' | '^');
        if negated {
            self.at += 1;
        }
        let mut ranges = Vec::new();
        while self.at < end {
            let low = self.member();
            let is_range = self.chars[self.at] == '-' && self.at + 1 < end;
            let high = if is_range {
                self.at += 1;
                self.member()
            } else {
                low
            };
            if high < low {
                return Err(BadPattern::ReversedRange);
            }
            ranges.push((low, high));
        }
        self.at = end + 1;
        self.ops.push(Op::Class { negated, ranges });
        Ok(())
    }

    /// One member of a class. `class_end` has seen that something follows a backslash.
    fn member(&mut self) -> char {
        if self.chars[self.at] == '\\' {
            self.at += 1;
        }
        self.at += 1;
        self.chars[self.at - 1]
    }

    /// Alternatives up to `close`, or to the end when there is none.
    fn alternatives(&mut self, separator: char, close: Option<char>, depth: usize) -> Result<(), BadPattern> {
        let stops: Vec<char> = [separator].into_iter().chain(close).collect();
        let mut exits = Vec::new();
        loop {
            let split = self.ops.len();
            self.ops.push(Op::Fail);
            self.sequence(&stops, depth)?;
            exits.push(self.ops.len());
            self.ops.push(Op::Fail);
            self.ops[split] = Op::Split(split + 1, self.ops.len());
            match self.chars.get(self.at) {
                Some(c) if *c == separator => self.at += 1,
                Some(_) => {
                    self.at += 1;
                    break;
                }
                None if close.is_some() => return Err(BadPattern::OpenBrace),
                None => break,
            }
        }
        self.ops.push(Op::Fail);
        let end = self.ops.len();
        for exit in exits {
            self.ops[exit] = Op::Jump(end);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(pattern: &str, yes: &[&str], no: &[&str]) {
        let compiled = Pattern::new(pattern).unwrap();
        for path in yes {
            assert!(compiled.matches(b"/root", path.as_bytes()), "{pattern} should match {path}");
        }
        for path in no {
            assert!(!compiled.matches(b"/root", path.as_bytes()), "{pattern} should not match {path}");
        }
    }

    #[test]
    fn base_names() {
        check("*", &["a", "d/b", ".hidden", "d/.x"], &[]);
        check("**", &["a", "d/b", "d/e/c", ".hidden"], &[]);
        check("", &["a", "d/b"], &[]);
        check("*.md", &["a.md", "d/e/c.md", ".md"], &["a.mdx", "a"]);
        check("?.md", &["a.md", "ü.md", "d/日.md"], &["ab.md", ".md"]);
        check("[ab].md", &["a.md", "d/b.md"], &["c.md"]);
        check("[!ab].md", &["c.md"], &["a.md"]);
        check("[^a-c]", &["d"], &["b"]);
        check("[]a]", &["]", "a"], &["b"]);
        check("[a-]", &["a", "-"], &["b"]);
        check("[ä-ü]", &["ö"], &["a"]);
        check("[\\]]", &["]"], &["\\"]);
        check("*.{js,ts}", &["a.js", "d/b.ts"], &["a.jsx", "a."]);
        check("{a,{b,c}d}", &["a", "bd", "cd"], &["b", "d"]);
        check("a{,.bak}", &["a", "a.bak"], &["a.ba"]);
        check("\\*", &["*"], &["a"]);
        check("a***b", &["ab", "axyb"], &["ax"]);
        check("a**", &["a", "abc", "d/abc"], &["b"]);
        check("a}", &["a}"], &["a"]);
        check("50%.txt", &["50%.txt"], &["50.txt"]);
        check("(a)+.x", &["(a)+.x"], &["a.x"]);
    }

    #[test]
    fn paths() {
        check("**/*.md", &["a.md", "d/b.md", "d/e/c.md"], &["a.txt"]);
        check("src/*.js", &["src/a.js"], &["src/x/b.js", "lib/c.js", "a.js", "x/src/a.js"]);
        check("src/**", &["src/a", "src/x/b"], &["a", "xsrc/a"]);
        check("src/**/*.js", &["src/a.js", "src/x/b.js", "src/x/y/c.js"], &["a.js"]);
        check("**/src/**/a", &["src/a", "x/src/a", "x/src/y/z/a"], &["xsrc/a", "src/ya"]);
        check("*/a", &["d/a"], &["a", "d/e/a"]);
        check("{src,lib}/*", &["src/a", "lib/b"], &["a", "x/b"]);
        check("{**/a,b/*}", &["a", "x/y/a", "b/c"], &["c"]);
        check("a?b/*", &[], &["a/b/c"]);
        check("a[/]b/c", &[], &["a/b/c"]);
        check("a[!x]b/c", &["ayb/c"], &["a/b/c"]);
        check("/root/*.md", &["a.md"], &["d/b.md"]);
        check("/**/b.md", &["b.md", "d/b.md"], &["a.md"]);
        check("./a", &[], &["a"]);
    }

    #[test]
    fn exclusions() {
        check("!(a|b)", &["c", "ab", "d/c"], &["a", "d/b"]);
        check("!(*.md)", &["a.txt"], &["a.md"]);
        check("*.!(js|ts)", &["a.md", "a.jsx"], &["a.js", "b"]);
        check("src/!(a).js", &["src/b.js", "src/ab.js"], &["src/a.js", "b.js"]);
        check("**/!(x)*.md", &["a.md", "d/x.md"], &["a.txt"]);
        check("\\!(a)", &["!(a)"], &["b"]);
        check("src/*!(a)", &["src/b", "src/a"], &["src/x/b", "b"]);
        check("src/!(a)*", &["src/b", "src/a"], &["src/x/b"]);
        check("!(a*)*b", &["cb", "ab"], &["a"]);
    }

    #[test]
    fn names_that_are_not_utf8_match_wildcards() {
        let star = Pattern::new("*.txt").unwrap();
        assert!(star.matches(b"/", b"\xff\xfe.txt"));
        assert!(Pattern::new("??.txt").unwrap().matches(b"/", b"\xff\xfe.txt"));
    }

    #[test]
    fn bad_patterns() {
        for (pattern, error) in [
            ("[a", BadPattern::OpenClass),
            ("[", BadPattern::OpenClass),
            ("[]", BadPattern::OpenClass),
            ("[a\\", BadPattern::OpenClass),
            ("{a,b", BadPattern::OpenBrace),
            ("[z-a]", BadPattern::ReversedRange),
            ("a\\", BadPattern::TrailingBackslash),
            ("!(a", BadPattern::OpenExclusion),
            ("!(a)/b", BadPattern::MisplacedExclusion),
            ("!(a)!(b)", BadPattern::MisplacedExclusion),
            ("{!(a),b}", BadPattern::MisplacedExclusion),
        ] {
            assert_eq!(Pattern::new(pattern).err(), Some(error), "{pattern}");
        }
        assert_eq!(Pattern::new(&"{".repeat(100)).err(), Some(BadPattern::TooDeep));
        assert_eq!(Pattern::new(&"a".repeat(5000)).err(), Some(BadPattern::TooLong));
    }

    #[test]
    fn hostile_patterns_are_not_slow() {
        let pattern = Pattern::new(&"*a".repeat(500)).unwrap();
        let name = "a".repeat(255);
        let started = std::time::Instant::now();
        assert!(!pattern.matches(b"/", name.as_bytes()));
        let pattern = Pattern::new(&format!("*!({})*", "*a".repeat(500))).unwrap();
        assert!(pattern.matches(b"/", name.as_bytes()));
        assert!(started.elapsed() < std::time::Duration::from_secs(5));
    }

    proptest! {
        #[test]
        fn no_pattern_panics(pattern in "[-a-c/*?\\[\\]{},!()|\\\\^ü.]{0,24}", path in "[a-c/.ü]{1,12}") {
            if let Ok(pattern) = Pattern::new(&pattern) {
                pattern.matches(b"/r", path.as_bytes());
            }
        }

        #[test]
        fn an_escaped_name_matches_itself_alone(name in "[^/\0]{1,20}", other in "[^/\0]{1,20}") {
            let escaped: String = name.chars().flat_map(|c| ['\\', c]).collect();
            let pattern = Pattern::new(&escaped).unwrap();
            prop_assert!(pattern.matches(b"/", name.as_bytes()));
            prop_assert_eq!(pattern.matches(b"/", other.as_bytes()), name == other);
        }

        #[test]
        fn prefix_star_suffix(prefix in "[a-z]{0,5}", middle in "[a-z]{0,5}", suffix in "[a-z]{0,5}") {
            let pattern = Pattern::new(&format!("{prefix}*{suffix}")).unwrap();
            let name = format!("{prefix}{middle}{suffix}");
            prop_assume!(!name.is_empty());
            prop_assert!(pattern.matches(b"/", name.as_bytes()));
        }
    }
}
