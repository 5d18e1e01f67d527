//! Generates a classic BPF program that decides by system call number through a binary search.
//!
//! The kernel walks a new filter once for every system call number, and a linear chain makes that walk cost a
//! millisecond. A balanced tree of comparisons costs a twentieth of it.

use std::collections::BTreeMap;

/// One instruction, in the kernel's layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Insn {
    code: u16,
    jt: u8,
    jf: u8,
    k: u32,
}

const LD_W_ABS: u16 = 0x20;
const ALU_AND_K: u16 = 0x54;
const JMP_JA: u16 = 0x05;
const JMP_JEQ_K: u16 = 0x15;
const JMP_JGE_K: u16 = 0x35;
const RET_K: u16 = 0x06;

const RET_ALLOW: u32 = 0x7fff_0000;
const RET_ERRNO: u32 = 0x0005_0000;
const RET_KILL_PROCESS: u32 = 0x8000_0000;

const OFFSET_NR: u32 = 0;
const OFFSET_ARCH: u32 = 4;

/// What to do with a system call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Let it through.
    Allow,
    /// Fail with this error number.
    Errno(u16),
    /// Look at one argument (its low 32 bits, which is all the kernel reads of those we test).
    Arg(ArgTest),
}

/// A decision by one argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ArgTest {
    /// Index of the argument, 0 to 5.
    pub(super) index: u8,
    /// Bits of the argument to look at.
    pub(super) mask: u32,
    /// First match wins.
    pub(super) cases: Vec<(u32, Verdict)>,
    /// When nothing matches.
    pub(super) otherwise: Box<Verdict>,
}

fn insn(code: u16, k: u32) -> Insn {
    Insn { code, jt: 0, jf: 0, k }
}

/// Code for a verdict; always ends in a return on every path.
fn leaf(verdict: &Verdict) -> Vec<Insn> {
    match verdict {
        Verdict::Allow => vec![insn(RET_K, RET_ALLOW)],
        Verdict::Errno(errno) => vec![insn(RET_K, RET_ERRNO | u32::from(*errno))],
        Verdict::Arg(test) => {
            let mut code = vec![insn(LD_W_ABS, low_word_offset(test.index))];
            if test.mask != u32::MAX {
                code.push(insn(ALU_AND_K, test.mask));
            }
            for (value, verdict) in &test.cases {
                let then = leaf(verdict);
                branch(&mut code, JMP_JEQ_K, *value, then);
            }
            code.extend(leaf(&test.otherwise));
            code
        }
    }
}

fn low_word_offset(index: u8) -> u32 {
    let word = 16 + u32::from(index) * 8;
    if cfg!(target_endian = "big") { word + 4 } else { word }
}

/// Appends "if the comparison holds, run `then`"; what follows is the other branch.
fn branch(code: &mut Vec<Insn>, comparison: u16, k: u32, then: Vec<Insn>) {
    match u8::try_from(then.len()) {
        Ok(skip) => code.push(Insn { code: comparison, jt: 0, jf: skip, k }),
        Err(_) => {
            // Conditional jumps reach 255 instructions; an unconditional one reaches all.
            code.push(Insn { code: comparison, jt: 1, jf: 0, k });
            code.push(insn(JMP_JA, u32::try_from(then.len()).unwrap_or(u32::MAX)));
        }
    }
    code.extend(then);
}

/// Builds the program. Numbers that `table` does not name get `between` up to its largest number and `beyond`
/// after it.
pub(super) fn program(
    arch: u32,
    table: &BTreeMap<u32, Verdict>,
    between: &Verdict,
    beyond: &Verdict,
) -> Vec<Insn> {
    let mut ranges: Vec<(u32, &Verdict)> = Vec::new();
    let mut push = |start: u32, verdict| {
        if ranges.last().is_none_or(|(_, last)| *last != verdict) {
            ranges.push((start, verdict));
        }
    };
    let mut next = 0;
    for (&number, verdict) in table {
        if number > next {
            push(next, between);
        }
        push(number, verdict);
        next = number + 1;
    }
    push(next, beyond);

    let mut code = vec![
        insn(LD_W_ABS, OFFSET_ARCH),
        // Another architecture's numbers mean other calls.
        Insn { code: JMP_JEQ_K, jt: 1, jf: 0, k: arch },
        insn(RET_K, RET_KILL_PROCESS),
        insn(LD_W_ABS, OFFSET_NR),
    ];
    code.extend(tree(&ranges));
    code
}

fn tree(ranges: &[(u32, &Verdict)]) -> Vec<Insn> {
    match ranges {
        [] => vec![insn(RET_K, RET_KILL_PROCESS)],
        [(_, verdict)] => leaf(verdict),
        _ => {
            let (low, high) = ranges.split_at(ranges.len() / 2);
            let mut code = Vec::new();
            branch(&mut code, JMP_JGE_K, high[0].0, tree(high));
            code.extend(tree(low));
            code
        }
    }
}

#[cfg(test)]
pub(super) mod interpreter {
    use super::*;

    /// Result of a run: the kernel's return value and the number of instructions it took.
    pub(in super::super) fn run(program: &[Insn], nr: u32, arch: u32, args: [u64; 6]) -> (u32, usize) {
        let mut data = [0u32; 16];
        data[0] = nr;
        data[1] = arch;
        for (i, arg) in args.iter().enumerate() {
            data[4 + 2 * i] = *arg as u32;
            data[5 + 2 * i] = (*arg >> 32) as u32;
        }
        let (mut pc, mut a, mut steps) = (0usize, 0u32, 0usize);
        loop {
            let i = program[pc];
            steps += 1;
            pc += 1;
            match i.code {
                LD_W_ABS => a = data[(i.k / 4) as usize],
                ALU_AND_K => a &= i.k,
                JMP_JA => pc += i.k as usize,
                JMP_JEQ_K => pc += usize::from(if a == i.k { i.jt } else { i.jf }),
                JMP_JGE_K => pc += usize::from(if a >= i.k { i.jt } else { i.jf }),
                RET_K => return (i.k, steps),
                other => panic!("unknown instruction {other:#x}"),
            }
        }
    }

    pub(in super::super) fn value(verdict: &Verdict, args: [u64; 6]) -> u32 {
        match verdict {
            Verdict::Allow => RET_ALLOW,
            Verdict::Errno(errno) => RET_ERRNO | u32::from(*errno),
            Verdict::Arg(test) => {
                let arg = args[usize::from(test.index)] as u32 & test.mask;
                let hit = test.cases.iter().find(|(value, _)| *value == arg).map(|(_, verdict)| verdict);
                value(hit.unwrap_or(&test.otherwise), args)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn verdicts() -> impl Strategy<Value = Verdict> {
        let flat = prop_oneof![Just(Verdict::Allow), (1u16..200).prop_map(Verdict::Errno)];
        flat.prop_recursive(2, 8, 4, |inner| {
            (
                0u8..6,
                prop_oneof![Just(u32::MAX), any::<u32>()],
                proptest::collection::vec((0u32..8, inner.clone()), 0..5),
                inner,
            )
                .prop_map(|(index, mask, cases, otherwise)| {
                    Verdict::Arg(ArgTest { index, mask, cases, otherwise: Box::new(otherwise) })
                })
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn program_decides_as_the_table_says(
            table in proptest::collection::btree_map(0u32..600, verdicts(), 0..300),
            probes in proptest::collection::vec((0u32..700, any::<[u64; 6]>()), 50),
            small in any::<u8>(),
        ) {
            let (between, beyond) = (Verdict::Errno(1), Verdict::Errno(38));
            let code = program(7, &table, &between, &beyond);
            let end = table.keys().last().map_or(0, |n| n + 1);
            for (nr, mut args) in probes {
                args[0] = u64::from(small % 8);
                let verdict = table.get(&nr).unwrap_or(if nr < end { &between } else { &beyond });
                prop_assert_eq!(interpreter::run(&code, nr, 7, args).0, interpreter::value(verdict, args));
                prop_assert_eq!(interpreter::run(&code, nr, 8, args).0, RET_KILL_PROCESS);
            }
        }
    }
}
