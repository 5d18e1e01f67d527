//! The variables of a sandbox.

use std::collections::HashMap;

use osb_protocol::boot::LineEndings;

/// Used when neither image nor request name one.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// File to which clients append variables for later commands.
const ENVS_FILE: &str = "/opt/opensandbox/.env";

/// Variables of entrypoint and commands, and what some of them tell the daemon.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Environment {
    pub(crate) variables: Vec<(String, String)>,
    pub(crate) line_endings: LineEndings,
    pub(crate) access_token: Option<String>,
}

/// The image's variables under the request's, with defaults for what every program expects.
pub(crate) fn of(
    image: &[(String, String)],
    request: Vec<(String, String)>,
    line_endings: LineEndings,
) -> Environment {
    let mut variables: Vec<(String, String)> = Vec::with_capacity(image.len() + request.len() + 3);
    // A request may bring tens of thousands: each is looked up, not searched for.
    let mut places: HashMap<String, usize> = HashMap::with_capacity(variables.capacity());
    for (name, value) in image.iter().cloned().chain(request) {
        match places.get(&name) {
            Some(&place) => variables[place].1 = value,
            None => {
                places.insert(name.clone(), variables.len());
                variables.push((name, value));
            }
        }
    }
    for (name, value) in [("PATH", PATH), ("LANG", "C.UTF-8"), ("EXECD_ENVS", ENVS_FILE)] {
        if !variables.iter().any(|(known, _)| known == name) {
            variables.push((name.to_owned(), value.to_owned()));
        }
    }
    let value =
        |name: &str| variables.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
    let line_endings = match value("EXECD_LINE_ENDINGS").map(str::trim) {
        Some("strip") => LineEndings::Strip,
        Some("keep") => LineEndings::Keep,
        _ => line_endings,
    };
    let access_token = value("EXECD_ACCESS_TOKEN").filter(|token| !token.is_empty()).map(str::to_owned);
    Environment { variables, line_endings, access_token }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn the_request_wins_and_defaults_fill_in() {
        let got = of(
            &pairs(&[("A", "image"), ("PATH", "/x")]),
            pairs(&[("A", "request"), ("B", "")]),
            LineEndings::Keep,
        );
        assert_eq!(
            got.variables,
            pairs(&[
                ("A", "request"),
                ("PATH", "/x"),
                ("B", ""),
                ("LANG", "C.UTF-8"),
                ("EXECD_ENVS", ENVS_FILE)
            ])
        );
        assert_eq!(got.access_token, None);
    }

    #[test]
    fn many_variables_cost_no_more_than_their_number() {
        let many: Vec<_> = (0..100_000).map(|n| (format!("A{n}"), "x".to_owned())).collect();
        let began = std::time::Instant::now();
        assert_eq!(of(&many, many.clone(), LineEndings::Keep).variables.len(), many.len() + 3);
        assert!(began.elapsed() < std::time::Duration::from_secs(5), "{:?}", began.elapsed());
    }

    #[test]
    fn the_daemons_switches_are_read() {
        let request = pairs(&[("EXECD_LINE_ENDINGS", "strip"), ("EXECD_ACCESS_TOKEN", "t")]);
        let got = of(&[], request, LineEndings::Keep);
        assert_eq!((got.line_endings, got.access_token.as_deref()), (LineEndings::Strip, Some("t")));
        assert_eq!(
            of(&[], pairs(&[("EXECD_LINE_ENDINGS", "?")]), LineEndings::Strip).line_endings,
            LineEndings::Strip
        );
    }
}
