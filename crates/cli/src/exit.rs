//! Exit codes. Those of commands that ran in a sandbox are passed on as they are.

/// All went well.
pub const SUCCESS: u8 = 0;
/// Something failed; standard error says what.
pub const FAILURE: u8 = 1;
/// The command line is not right.
pub const USAGE: u8 = 2;
/// Running a program: the failure is not the program's; it was not started or its end is not known.
pub const NOT_RUN: u8 = 125;
/// The program cannot be executed.
pub const NOT_FOUND: u8 = 127;
/// Added to the number of the signal that ended `osb`, or the program.
pub const SIGNAL: u8 = 128;

/// Every code and what it means, for help texts and pages.
pub const TABLE: [(&str, &str); 7] = [
    ("0", "success"),
    ("1", "failure; standard error says what"),
    ("2", "the command line is not right"),
    ("125", "run, command run: the program was not run, or its end is not known"),
    ("127", "run, command run: the program cannot be executed"),
    ("128+N", "signal N ended osb, or the program"),
    ("other", "run, command run, logs -f: the program's own exit code"),
];

/// The table as a paragraph of help.
#[must_use]
pub fn help() -> String {
    let rows = TABLE.map(|(code, meaning)| format!("  {code:<6} {meaning}\n"));
    format!("Exit codes:\n{}", rows.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_code_once() {
        let codes: Vec<String> = TABLE.iter().map(|(code, _)| (*code).to_owned()).collect();
        for code in [SUCCESS, FAILURE, USAGE, NOT_RUN, NOT_FOUND] {
            assert_eq!(codes.iter().filter(|shown| **shown == code.to_string()).count(), 1, "{code}");
        }
        assert!(codes.contains(&format!("{SIGNAL}+N")));
        assert!(help().starts_with("Exit codes:\n  0      success\n"), "{}", help());
    }
}
