//! Reads sections of a TOML file: leniently as to types, strictly as to values, and without ever repeating a
//! value, since it may be a secret.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::env::Env;

/// What was found while a file was read.
pub(super) struct Findings<'a> {
    text: &'a str,
    env: &'a Env,
    errors: RefCell<Vec<String>>,
    warnings: RefCell<Vec<String>>,
}

impl<'a> Findings<'a> {
    pub(super) fn new(text: &'a str, env: &'a Env) -> Self {
        Self { text, env, errors: RefCell::default(), warnings: RefCell::default() }
    }

    pub(super) fn env(&self) -> &'a Env {
        self.env
    }

    pub(super) fn error(&self, message: impl Into<String>) {
        self.errors.borrow_mut().push(message.into());
    }

    pub(super) fn warn(&self, message: impl Into<String>) {
        self.warnings.borrow_mut().push(message.into());
    }

    /// Errors and warnings.
    pub(super) fn finish(self) -> (Vec<String>, Vec<String>) {
        (self.errors.into_inner(), self.warnings.into_inner())
    }

    pub(super) fn line(&self, offset: usize) -> usize {
        1 + self.text.as_bytes().iter().take(offset).filter(|b| **b == b'\n').count()
    }
}

/// A table of the file, whose keys are taken out one by one.
pub(super) struct Section<'f, 'a> {
    findings: &'f Findings<'a>,
    path: String,
    table: DeTable<'a>,
    present: bool,
    from_env: bool,
}

impl<'f, 'a> Section<'f, 'a> {
    /// The whole file.
    pub(super) fn root(findings: &'f Findings<'a>, table: DeTable<'a>) -> Self {
        Self { findings, path: String::new(), table, present: true, from_env: false }
    }

    /// Lets variables `OPENSANDBOX_<SECTION>_<KEY>` win over the keys of this section.
    pub(super) fn with_env(mut self) -> Self {
        self.from_env = true;
        self
    }

    /// Whether the file has the section.
    pub(super) fn present(&self) -> bool {
        self.present
    }

    pub(super) fn findings(&self) -> &'f Findings<'a> {
        self.findings
    }

    /// A table below this one; an empty one when the file has none.
    pub(super) fn section(&mut self, key: &str) -> Section<'f, 'a> {
        let path = self.name(key);
        let mut section = Section {
            findings: self.findings,
            path,
            table: DeTable::new(),
            present: false,
            from_env: self.from_env,
        };
        match self.take(key).map(Spanned::into_inner) {
            Some(DeValue::Table(table)) => {
                section.table = table;
                section.present = true;
            }
            Some(_) => self.findings.error(format!("{}: a table is expected", section.path)),
            None => {}
        }
        section
    }

    /// The tables below a table, by name. No variable stands for a key of theirs.
    pub(super) fn named_sections(&mut self, key: &str) -> Vec<(String, Section<'f, 'a>)> {
        let mut all = self.section(key);
        all.from_env = false;
        let names: Vec<String> = all.table.keys().map(|name| name.get_ref().to_string()).collect();
        names
            .into_iter()
            .map(|name| {
                let section = all.section(&name);
                (name, section)
            })
            .collect()
    }

    /// A list of tables.
    pub(super) fn sections(&mut self, key: &str) -> Vec<Section<'f, 'a>> {
        let path = self.name(key);
        let Some(value) = self.take(key) else { return Vec::new() };
        let DeValue::Array(items) = value.into_inner() else {
            self.findings.error(format!("{path}: a list of tables is expected"));
            return Vec::new();
        };
        let mut sections = Vec::new();
        for (at, item) in items.into_iter().enumerate() {
            let path = format!("{path}[{at}]");
            match item.into_inner() {
                DeValue::Table(table) => sections.push(Section {
                    findings: self.findings,
                    path,
                    table,
                    present: true,
                    from_env: false,
                }),
                _ => self.findings.error(format!("{path}: a table is expected")),
            }
        }
        sections
    }

    /// A text. Blank counts as absent.
    pub(super) fn text(&mut self, key: &str) -> Option<String> {
        let value = match self.variable(key) {
            Some(value) => value.to_owned(),
            None => match self.take(key)?.into_inner() {
                DeValue::String(text) => text.into_owned(),
                _ => return self.refuse(key, "a text in quotes is expected"),
            },
        };
        Some(value).filter(|text| !text.trim().is_empty())
    }

    /// A text with a default.
    pub(super) fn text_or(&mut self, key: &str, default: &str) -> String {
        self.text(key).unwrap_or_else(|| default.to_owned())
    }

    /// One of some words, in any case; with a default.
    pub(super) fn word<T: Copy>(&mut self, key: &str, words: &[(&str, T)], default: T) -> T {
        let Some(text) = self.text(key) else { return default };
        match words.iter().find(|(word, _)| word.eq_ignore_ascii_case(text.trim())) {
            Some((_, value)) => *value,
            None => {
                let words = words.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", ");
                self.refuse::<T>(key, &format!("one of {words} is expected"));
                default
            }
        }
    }

    /// A whole number in a range.
    pub(super) fn int(&mut self, key: &str, range: RangeInclusive<i64>) -> Option<i64> {
        let number = match self.variable(key) {
            Some(text) => whole(text),
            None => match self.take(key)?.into_inner() {
                DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix()).ok(),
                DeValue::Float(number) => whole(number.as_str()),
                DeValue::String(text) => whole(&text),
                _ => None,
            },
        };
        match number.filter(|n| range.contains(n)) {
            Some(number) => Some(number),
            None if *range.end() == i64::MAX => {
                self.refuse(key, &format!("a whole number of at least {} is expected", range.start()))
            }
            None => self.refuse(
                key,
                &format!("a whole number from {} to {} is expected", range.start(), range.end()),
            ),
        }
    }

    /// A whole number in a range, with a default.
    pub(super) fn int_or<T: TryFrom<i64> + Copy>(
        &mut self,
        key: &str,
        range: RangeInclusive<i64>,
        default: T,
    ) -> T {
        self.int(key, range).and_then(|n| T::try_from(n).ok()).unwrap_or(default)
    }

    /// A number of at least `min` (more than `min` when `open`), with a default.
    pub(super) fn float_or(&mut self, key: &str, min: f64, open: bool, default: f64) -> f64 {
        let number = match self.variable(key) {
            Some(text) => text.trim().parse::<f64>().ok(),
            None => match self.take(key).map(Spanned::into_inner) {
                None => return default,
                Some(DeValue::Float(number)) => number.as_str().parse().ok(),
                Some(DeValue::Integer(number)) => number.as_str().parse().ok(),
                Some(DeValue::String(text)) => text.trim().parse().ok(),
                Some(_) => None,
            },
        };
        match number.filter(|n| n.is_finite() && (*n > min || !open && *n >= min)) {
            Some(number) => number,
            None => {
                let bound = if open { "more than" } else { "at least" };
                self.refuse::<f64>(key, &format!("a number of {bound} {min} is expected"));
                default
            }
        }
    }

    /// A switch, with a default.
    pub(super) fn flag(&mut self, key: &str, default: bool) -> bool {
        let read = match self.variable(key) {
            Some(text) => flag(text),
            None => match self.take(key).map(Spanned::into_inner) {
                None => return default,
                Some(DeValue::Boolean(value)) => Some(value),
                Some(DeValue::String(text)) => flag(&text),
                Some(DeValue::Integer(number)) => flag(number.as_str()),
                Some(_) => None,
            },
        };
        read.unwrap_or_else(|| {
            self.refuse::<bool>(key, "true or false is expected");
            default
        })
    }

    /// A list of texts. From a variable: separated by commas.
    pub(super) fn list(&mut self, key: &str) -> Option<Vec<String>> {
        if let Some(text) = self.variable(key) {
            return Some(
                text.split(',').map(str::trim).filter(|s| !s.is_empty()).map(str::to_owned).collect(),
            );
        }
        let DeValue::Array(items) = self.take(key)?.into_inner() else {
            return self.refuse(key, "a list of texts is expected");
        };
        let mut texts = Vec::with_capacity(items.len());
        for item in items {
            match item.into_inner() {
                DeValue::String(text) => texts.push(text.into_owned()),
                _ => return self.refuse(key, "a list of texts is expected"),
            }
        }
        Some(texts)
    }

    /// A table of texts; numbers and switches are taken as they are written.
    pub(super) fn map(&mut self, key: &str) -> BTreeMap<String, String> {
        let mut map = BTreeMap::new();
        let Some(value) = self.take(key) else { return map };
        let DeValue::Table(table) = value.into_inner() else {
            self.refuse::<()>(key, "a table of texts is expected");
            return map;
        };
        for (name, value) in table {
            let text = match value.into_inner() {
                DeValue::String(text) => text.into_owned(),
                DeValue::Integer(number) => number.to_string(),
                DeValue::Float(number) => number.to_string(),
                DeValue::Boolean(value) => value.to_string(),
                _ => {
                    self.refuse::<()>(key, "a table of texts is expected");
                    continue;
                }
            };
            map.insert(name.into_inner().into_owned(), text);
        }
        map
    }

    /// A text that `parse` understands. Its error must not repeat the text.
    pub(super) fn parsed<T, E: std::fmt::Display>(
        &mut self,
        key: &str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        let text = match self.variable(key) {
            Some(text) => text.to_owned(),
            None => match self.take(key)?.into_inner() {
                DeValue::String(text) => text.into_owned(),
                DeValue::Integer(number) => number.to_string(),
                DeValue::Float(number) => number.to_string(),
                _ => return self.refuse(key, "a text in quotes is expected"),
            },
        };
        if text.trim().is_empty() {
            return None;
        }
        parse(text.trim()).map_or_else(|error| self.refuse(key, &error.to_string()), Some)
    }

    /// Takes a key out without looking at it.
    pub(super) fn ignore(&mut self, key: &str) {
        self.table.remove(key);
    }

    /// Ends the section: whatever is left is unknown.
    pub(super) fn end(self) {
        for key in self.table.keys() {
            let line = self.findings.line(key.span().start);
            let name = join(&self.path, key.get_ref());
            self.findings.warn(format!("line {line}: unknown key {name} is ignored"));
        }
    }

    /// Notes an error of this key.
    pub(super) fn refuse<T>(&self, key: &str, message: &str) -> Option<T> {
        self.findings.error(format!("{}: {message}", self.name(key)));
        None
    }

    fn name(&self, key: &str) -> String {
        join(&self.path, key)
    }

    fn variable(&self, key: &str) -> Option<&'a str> {
        if !self.from_env {
            return None;
        }
        let name = self.name(key).replace('.', "_").to_uppercase();
        self.findings.env.get(&format!("OPENSANDBOX_{name}")).filter(|value| !value.is_empty())
    }

    fn take(&mut self, key: &str) -> Option<Spanned<DeValue<'a>>> {
        self.table.remove(key)
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

fn whole(text: &str) -> Option<i64> {
    let text = text.trim().replace('_', "");
    if let Ok(number) = text.parse() {
        return Some(number);
    }
    let number: f64 = text.parse().ok()?;
    #[allow(clippy::cast_possible_truncation)]
    (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64)
}

fn flag(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" | "t" | "y" => Some(true),
        "false" | "0" | "no" | "off" | "f" | "n" => Some(false),
        _ => None,
    }
}
