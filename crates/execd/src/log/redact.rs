//! Takes secrets out of what is written to the log.
//!
//! It looks for where secrets stand, not for what they are, and takes away too much rather than too little: a value
//! is masked up to the next blank that no quote holds, and to the end of the text where a quote is not closed.

use std::borrow::Cow;
use std::ops::Range;

const MASK: &str = "****";

/// Words that make a name one of a secret. Part of a name is enough, in any case.
const SECRET: [&str; 14] = [
    "token",
    "secret",
    "password",
    "passwd",
    "passphrase",
    "passcode",
    "pwd",
    "key",
    "credential",
    "auth",
    "cookie",
    "signature",
    "session-id",
    "sessionid",
];
/// Beginnings of keys that are known by their shape, which goes on for at least [`SHAPE`] characters.
const SHAPES: [&str; 15] = [
    "LTAI",
    "AKIA",
    "ASIA",
    "AKID",
    "ghp_",
    "gho_",
    "ghu_",
    "ghs_",
    "ghr_",
    "github_pat_",
    "glpat-",
    "sk-",
    "xoxb-",
    "xoxp-",
    "eyJ",
];
const SHAPE: usize = 10;
/// Words before a credential in a header's value.
const SCHEMES: [&str; 5] = ["bearer", "basic", "digest", "negotiate", "apikey"];
/// Programs whose `-p` (or `-a`) is a password.
const PASSWORD_PROGRAMS: [&str; 9] =
    ["mysql", "mariadb", "sshpass", "docker", "podman", "nerdctl", "helm", "redis-cli", "7z"];

/// The text without its secrets: a command line, a message, a URL.
#[must_use]
pub fn text(text: &str) -> Cow<'_, str> {
    let mut masks: Vec<Range<usize>> = Vec::new();
    let mut at = 0;
    while at < text.len() {
        let rest = &text[at..];
        if rest.starts_with("://") {
            masks.extend(user_info(text, at + 3));
            at += 3;
        } else if let Some(length) = run(rest) {
            at = secrets_of(text, at..at + length, &mut masks);
        } else {
            at += rest.chars().next().map_or(1, char::len_utf8);
        }
    }
    masked(text, masks)
}

/// The text of an argument list, as the status shows it.
#[must_use]
pub fn argv(argv: &[String]) -> String {
    let mut shown = Vec::new();
    let mut of_flag = false;
    let takes_password = argv.iter().any(|word| names_password_program(word));
    for word in argv {
        let name = run(word).map_or("", |length| &word[..length]);
        let after = &word[name.len()..];
        let is_secret = is_secret_name(name);
        let short = takes_password && (word.starts_with("-p") || word.starts_with("-a"));
        shown.push(if of_flag {
            MASK.to_owned()
        } else if is_secret && after.starts_with(['=', ':']) {
            format!("{name}{}{MASK}", &after[..1])
        } else if short && word.len() > 2 {
            format!("{}{MASK}", &word[..2])
        } else {
            text(word).into_owned()
        });
        of_flag = !of_flag && name.starts_with('-') && after.is_empty() && (is_secret || short)
            || matches!(word.as_str(), "-u" | "--user" | "--proxy-user" | "-U");
    }
    serde_json::to_string(&shown).unwrap_or_default()
}

/// A request's target: its path and query, parameters of secrets masked.
#[must_use]
pub fn target(path: &str, query: Option<&str>) -> String {
    let mut shown = text(path).into_owned();
    for (at, pair) in query.iter().flat_map(|query| query.split('&')).enumerate() {
        shown.push(if at == 0 { '?' } else { '&' });
        let decoded = form_urlencoded::parse(pair.as_bytes()).next();
        let is_plain = decoded.is_none_or(|(name, value)| {
            !is_secret_name(&name)
                && matches!(text(&name), Cow::Borrowed(_))
                && matches!(text(&value), Cow::Borrowed(_))
        });
        match pair.split_once('=') {
            _ if is_plain => shown.push_str(pair),
            Some((name, _)) if run(name) == Some(name.len()) => {
                shown.push_str(name);
                shown.push('=');
                shown.push_str(MASK);
            }
            _ => shown.push_str(MASK),
        }
    }
    shown
}

fn masked(text: &str, mut masks: Vec<Range<usize>>) -> Cow<'_, str> {
    if masks.is_empty() {
        return Cow::Borrowed(text);
    }
    masks.sort_by_key(|mask| mask.start);
    let mut shown = String::with_capacity(text.len());
    let mut at = 0;
    for mask in masks {
        if mask.start >= at {
            shown.push_str(&text[at..mask.start]);
            shown.push_str(MASK);
        }
        at = at.max(mask.end);
    }
    shown.push_str(&text[at..]);
    Cow::Owned(shown)
}

/// Length of the name at the start of `text`: letters, digits, `_`, `-` and `.`.
fn run(text: &str) -> Option<usize> {
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    let length = text.bytes().take_while(|byte| is_part(byte)).count();
    (length > 0).then_some(length)
}

fn is_secret_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRET.iter().any(|word| name.contains(word))
}

fn names_password_program(word: &str) -> bool {
    PASSWORD_PROGRAMS.iter().any(|program| word.contains(program))
}

/// The user's part of a URL whose scheme has ended before `start`.
fn user_info(text: &str, start: usize) -> Option<Range<usize>> {
    let is_end = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '`');
    let end = text[start..].find(is_end).map_or(text.len(), |length| start + length);
    // A password may hold what should have been encoded, so the last sign counts.
    let at = text[start..end].rfind('@')?;
    Some(start..start + at)
}

/// Finds what is secret about the name at `name` and what stands behind it; gives where to look on.
fn secrets_of(text: &str, name: Range<usize>, masks: &mut Vec<Range<usize>>) -> usize {
    let word = &text[name.clone()];
    let after = &text[name.end..];
    for shape in SHAPES {
        if let Some(at) = word.find(shape)
            && word.len() - at - shape.len() >= SHAPE
        {
            masks.push(name.start + at..name.end);
        }
    }
    if is_secret_name(word) {
        if let Some((value, is_closed)) = assigned(text, &name) {
            masks.push(value.clone());
            if is_closed {
                return value.end;
            }
        } else if word.starts_with('-') && after.starts_with([' ', '\t', '\\']) {
            masks.push(next_word(text, name.end));
        }
    }
    if SCHEMES.contains(&word.to_ascii_lowercase().as_str()) && after.starts_with([' ', '\t']) {
        masks.push(next_word(text, name.end));
    }
    if matches!(word, "-u" | "--user" | "--proxy-user") {
        let value = next_word(text, name.end);
        if text[value.clone()].contains(':') {
            masks.push(value);
        }
    } else if word.starts_with("-u") && after.starts_with(':') {
        masks.push(name.end + 1..word_end(text, name.end + 1));
    }
    if (word.starts_with("-p") || word == "-a") && names_password_program(text) {
        masks.push(match word.len() {
            2 if after.starts_with(['"', '\'', '$', '\\']) => name.end..word_end(text, name.end),
            2 => next_word(text, name.end),
            _ => name.start + 2..word_end(text, name.start + 2),
        });
    }
    name.end
}

/// The value that is assigned to the name, by `=` or by `:`, and whether a quote around both ends it.
fn assigned(text: &str, name: &Range<usize>) -> Option<(Range<usize>, bool)> {
    let quote = |at: usize| text[..at].chars().next_back().filter(|c| matches!(c, '"' | '\'' | '`'));
    let mut at = name.end;
    // The quote behind a key of JSON, perhaps escaped.
    let behind = text[at..].trim_start_matches('\\');
    let mut opened = quote(name.start);
    if let Some(mark) = behind.chars().next().filter(|c| Some(*c) == opened) {
        at = text.len() - behind.len() + mark.len_utf8();
        opened = None;
    }
    let blanks = text[at..].len() - text[at..].trim_start_matches([' ', '\t']).len();
    let sign = text[at + blanks..].chars().next().filter(|c| matches!(c, '=' | ':'))?;
    if blanks > 0 && sign == '=' && !text[at..].starts_with(" = ") {
        return None;
    }
    at += blanks + 1;
    at += text[at..].len() - text[at..].trim_start_matches([' ', '\t', '>', '=']).len();
    if let Some(mark) = opened {
        // The quote holds name and value: a header, an assignment.
        let end = quoted_end(text, at, mark);
        let behind = (end + mark.len_utf8()).min(text.len());
        // A word may go on behind its quote.
        let whole = word_end(text, behind);
        return Some(if whole == behind { (at..end, true) } else { (at..whole, false) });
    }
    let end = word_end(text, at);
    // `name: several words`
    let is_bare = sign == ':' && !text[at..].starts_with(['"', '\'', '\\']);
    let line_end = text[at..].find('\n').map_or(text.len(), |length| at + length);
    Some((at..if is_bare { end.max(line_end) } else { end }, false))
}

/// The word behind blanks at `at`.
fn next_word(text: &str, at: usize) -> Range<usize> {
    let start = text.len() - text[at..].trim_start_matches([' ', '\t', '\\', '\n']).len();
    start..word_end(text, start)
}

/// End of the shell's word that begins at `start`: at a blank that is neither quoted nor escaped.
fn word_end(text: &str, start: usize) -> usize {
    // A word in quotes that are escaped ends with such a quote.
    for mark in ["\\\"", "\\'"] {
        if let Some(rest) = text[start..].strip_prefix(mark) {
            return rest.find(mark).map_or(text.len(), |length| start + length + 2 * mark.len());
        }
    }
    let mut within = None;
    let mut chars = text[start..].char_indices();
    while let Some((at, c)) = chars.next() {
        match (within, c) {
            (Some('\''), '\\') => {}
            (_, '\\') => drop(chars.next()),
            (Some(mark), c) if c == mark => within = None,
            (None, '"' | '\'' | '`') => within = Some(c),
            (None, c) if c.is_whitespace() => return start + at,
            _ => {}
        }
    }
    text.len()
}

/// Where a quote that has been opened before `start` ends.
fn quoted_end(text: &str, start: usize, mark: char) -> usize {
    let mut escaped = false;
    for (at, c) in text[start..].char_indices() {
        if c == mark && !escaped {
            return start + at;
        }
        escaped = c == '\\' && !escaped && mark != '\'';
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_no_secret_stays() {
        for plain in [
            "",
            "ls -la /tmp | sort -u file && echo done",
            "python3 -u app.py --port 80:80",
            "curl https://example.org/a?b=c",
            "git clone git@example.org:a/b.git",
            "x='ä ö' y=\"$HOME\"; for i in 1 2; do echo $i; done",
            "cannot open /tmp/a: no such file",
        ] {
            assert_eq!(text(plain), plain);
            assert!(matches!(text(plain), Cow::Borrowed(_)));
        }
        assert_eq!(target("/files/info", Some("path=/a%20b&path=%2Fc")), "/files/info?path=/a%20b&path=%2Fc");
    }

    #[test]
    fn the_rest_of_a_line_can_still_be_read() {
        for (line, shown) in [
            ("curl -H \"X-Api-Key: a b\"'c d' x", "curl -H \"X-Api-Key: **** x"),
            ("export TOKEN=abc; ls", "export TOKEN=**** ls"),
            (
                "curl -H 'Authorization: Bearer s3cr3t' http://user:pw@h/x",
                "curl -H 'Authorization: ****' http://****@h/x",
            ),
            ("tool --token x --port 1", "tool --token **** --port 1"),
            ("tool --token=x --port 1", "tool --token=**** --port 1"),
            ("mysql -uroot -pPASS db", "mysql -uroot -p**** db"),
            ("PASSWORD='a b' run", "PASSWORD=**** run"),
            ("echo AKIAIOSFODNN7EXAMPLE end", "echo **** end"),
        ] {
            assert_eq!(text(line), shown);
        }
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        assert_eq!(argv(&words(&["a", "--api-key", "x y", "b"])), r#"["a","--api-key","****","b"]"#);
        assert_eq!(argv(&words(&["a", "PASSWORD=x y", "b"])), r#"["a","PASSWORD=****","b"]"#);
        assert_eq!(
            target("/proxy/80/x", Some("a=1&access_token=abc&b")),
            "/proxy/80/x?a=1&access_token=****&b"
        );
    }

    /// All places in which a secret may stand in a line; `{}` is the secret, which holds no blank or quote.
    const PLACES: [&str; 58] = [
        "curl http://user:{}@host/x",
        "git clone https://{}@host/x.git",
        "psql postgres://u:a/{}@db:5432/x?y=1",
        "curl -H 'Authorization: Bearer {}' x",
        "curl -H \"Authorization: Basic {}\" x",
        "curl -H \"authorization:token {}\"",
        "curl -H Authorization:{} x",
        "curl -H Authorization:\\ Bearer\\ {} x",
        "curl -H 'Proxy-Authorization: a {} b'",
        "curl -H 'Authorization: Digest username=\"u\", response=\"{}\"'",
        "curl -H $'Authorization: Bearer {}'",
        "wget --header='Authorization: Bearer {}' x",
        "curl -H 'X-Api-Key: {}'",
        "curl -H 'Cookie: a=b; c={}'",
        "curl -H 'OPEN-SANDBOX-API-KEY: {}'",
        "echo 'bearer {}'",
        "az --connection-string 'DefaultEndpointsProtocol=https;AccountKey={};EndpointSuffix=x'",
        "AccountKey={}",
        "tool --token {}",
        "tool --token={}",
        "tool --token '{}'",
        "tool --token=\"{}\"",
        "tool --token \\\n  {}",
        "tool -token {}",
        "tool --api-key\t{}",
        "tool --db-password '{} and more'",
        "tool --client-secret=\"a b {}\" c",
        "mysql -p{} db",
        "mysql -u root -p'{}' db",
        "mysqldump --password={} db",
        "sshpass -p {} ssh x",
        "docker login -u me -p {}",
        "redis-cli -a {}",
        "curl -u me:{} x",
        "curl -ume:{} x",
        "curl --user me:{} x",
        "curl --user 'me:{}' x",
        "export TOKEN={}",
        "TOKEN={} run",
        "MY_SECRET_1='{}' run",
        "db_passwd=\"{} x\" run",
        "export AWS_SECRET_ACCESS_KEY=\"a {}\"",
        "export PWD_X=a\\ {}",
        "sh -c 'TOKEN={}; run'",
        "sh -c \"export API_KEY='{}' && run\"",
        "sh -c \"PASSWORD=\\\"a {}\\\" run\"",
        "curl -d '{\"password\":\"{}\"}'",
        "curl -d '{\"password\": \"a {}\"}'",
        "curl -d \"{\\\"password\\\": \\\"a {}\\\"}\"",
        "curl -d 'user=a&password={}'",
        "curl 'http://h/?token={}&x=1'",
        "cat <<E\npassword: a {}\nE",
        "cat <<E\nsecret = {}\nE",
        "printf 'key=>{}'",
        "echo LTAI{}",
        "echo \"AKIA{}\"",
        "echo x/AKID{}/y",
        "TOKEN='{}",
    ];

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn no_secret_is_shown(
            secret in "[A-Za-z0-9_]{12,24}",
            odd in "[A-Za-z0-9+/=_.@:;!#%&|<>(){}?*~^-]{6}[A-Za-z0-9]{12}",
            places in proptest::collection::vec(0..PLACES.len(), 1..4),
            between in "( ; | && |\n| \\| |; # it is |, )",
        ) {
            let line = |secret: &str| {
                let lines: Vec<String> = places.iter().map(|place| PLACES[*place].replace("{}", secret)).collect();
                lines.join(&between)
            };
            let plain = line(&secret);
            prop_assert!(!text(&plain).contains(&secret), "{} -> {}", plain, text(&plain));
            // Keys known by their shape have letters and digits only.
            if places.iter().all(|place| !["LTAI", "AKIA", "AKID"].iter().any(|shape| PLACES[*place].contains(shape))) {
                let (line, tail) = (line(&odd), &odd[6..]);
                prop_assert!(!text(&line).contains(tail), "{} -> {}", line, text(&line));
            }
            let words: Vec<String> = plain.split(' ').map(str::to_owned).collect();
            let _ = argv(&words);
        }

        #[test]
        fn no_secret_argument_is_shown(secret in "[A-Za-z0-9+/=_ \"'-]{4}[A-Za-z0-9]{12}", form in 0..9_usize) {
            let tail = &secret[4..];
            let word = |word: &str| word.to_owned();
            let list = match form {
                0 => vec![word("x"), word("--token"), secret.clone()],
                1 => vec![word("x"), format!("--token={secret}")],
                2 => vec![word("curl"), word("-H"), format!("Authorization: Bearer {secret}")],
                3 => vec![word("env"), format!("PASSWORD={secret}"), word("x")],
                4 => vec![word("mysql"), format!("-p{secret}")],
                5 => vec![word("curl"), word("-u"), format!("me:{secret}")],
                6 => vec![word("sh"), word("-c"), format!("TOKEN='{}' x", secret.replace('\'', ""))],
                7 => vec![word("curl"), format!("https://u:{}@h/", secret.replace([' ', '"', '\''], ""))],
                _ => vec![word("x"), word("-api_key"), secret.clone(), word("y")],
            };
            prop_assert!(!argv(&list).contains(tail), "{:?} -> {}", list, argv(&list));
        }

        #[test]
        fn no_secret_of_a_query_is_shown(secret in "[A-Za-z0-9]{12,20}", form in 0..6_usize) {
            let query = match form {
                0 => format!("a=b&token={secret}"),
                1 => format!("X-Amz-Signature={secret}&c=d"),
                2 => format!("command=export%20TOKEN%3D{secret}"),
                3 => format!("url=http%3A%2F%2Fu%3A{secret}%40h"),
                4 => format!("to%6Ben={secret}"),
                _ => format!("h=Authorization:+Bearer+{secret}"),
            };
            prop_assert!(!target("/x", Some(&query)).contains(&secret), "{}", target("/x", Some(&query)));
        }

        #[test]
        fn any_text_is_borne(line in "\\PC{0,80}", path in "\\PC{0,40}") {
            let _ = (text(&line), argv(&[line.clone(), path.clone()]), target(&path, Some(&line)));
        }
    }
}
