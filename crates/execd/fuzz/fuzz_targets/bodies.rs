//! Bodies of requests and the file of variables: nothing in them hurts, and what comes out can be given to programs.
#![no_main]

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use libfuzzer_sys::fuzz_target;
use osb_execd::command::envfile;

fuzz_target!(|bytes: &[u8]| {
    osb_execd::fuzz::bodies(bytes);
    let home = OsStr::new("/root");
    for (name, value) in envfile::parse(bytes, |name| (name == "HOME").then_some(home)) {
        let name = name.as_bytes();
        assert!(!name.is_empty() && name.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_'));
        assert!(!name[0].is_ascii_digit() && !value.as_bytes().contains(&0));
        assert!(name.len() + value.as_bytes().len() < 128 << 10);
    }
    // Written so that nothing is lost, it is read back.
    if !bytes.contains(&b'\'') && !bytes.contains(&0) && bytes.len() < 100_000 {
        let text = [b"A='", bytes, b"'\nB=1\n"].concat();
        let read = envfile::parse(&text, |_| None);
        let expected = [("A", bytes), ("B", b"1".as_slice())];
        let read: Vec<(&str, &[u8])> =
            read.iter().map(|(name, value)| (name.to_str().unwrap(), value.as_bytes())).collect();
        assert_eq!(read, expected);
    }
});
