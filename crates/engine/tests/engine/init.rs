//! PID 1 of the tests' sandboxes: the least that speaks the boot protocol.

use std::fs::File;
use std::io::{IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitCode};

use osb_confine::seccomp::Filter;
use osb_protocol::boot::{Boot, Ended, Order, Started};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg};

fn own(number: i32) -> File {
    // SAFETY: the engine passed the descriptor, and each number is taken once.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).expect("a descriptor");
    fd.into()
}

/// The order, or `None` when nobody wants the sandbox. There is nothing to rehearse.
fn order(orders: &File) -> Option<Order> {
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let message =
            recvmsg(orders, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
        let document = control.drain().find_map(|part| match part {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next().map(File::from),
            _ => None,
        });
        if let Some(mut document) = document {
            document.rewind().unwrap();
            return Some(serde_json::from_reader(document).expect("an order"));
        }
        if message.bytes == 0 {
            return None;
        }
    }
}

fn answer(orders: &File, started: &Started) {
    rustix::net::send(orders, &serde_json::to_vec(started).unwrap(), SendFlags::empty()).unwrap();
}

pub(crate) fn main(number: &str) -> ExitCode {
    let mut text = Vec::new();
    let mut document = own(number.parse().unwrap());
    document.rewind().unwrap();
    document.read_to_end(&mut text).expect("the boot document");
    let boot: Boot = serde_json::from_slice(&text).expect("a boot document");
    let orders = own(boot.fds.orders);
    let mut ended = own(boot.fds.ended);
    let log = own(boot.fds.log);
    let _listener = own(boot.fds.listen);
    let work: Vec<File> = boot.fds.work_cgroup.iter().map(|number| own(*number)).collect();
    let _uppers = boot.fds.uppers.map(own);
    // As the real one: nothing else may do what isolated sessions are made with.
    let filter = boot.may_build.then(Filter::rest);
    let usage = &boot.fds.usage;
    let _usage: Vec<File> =
        [usage.cpuacct_usage, usage.cpu_stat, usage.memory_current, usage.memory_stat, usage.oom_events]
            .into_iter()
            .flatten()
            .map(own)
            .collect();

    let Some(order) = order(&orders) else { return ExitCode::SUCCESS };
    let mut command = Command::new(&order.entrypoint[0]);
    command
        .args(&order.entrypoint[1..])
        .env_clear()
        .envs(order.env)
        .current_dir(order.cwd.as_deref().unwrap_or("/"));
    command.stdout(log.try_clone().unwrap()).stderr(log);
    // SAFETY: writes to open descriptors, and a system call on the process itself.
    unsafe {
        command.pre_exec(move || {
            rustix::process::setpriority_process(None, 0)?;
            filter.as_ref().map_or(Ok(()), Filter::install)?;
            work.iter().try_for_each(|mut file| file.write_all(b"0"))
        });
    }
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            let failed = Started::Failed { errno: error.raw_os_error(), message: error.to_string() };
            answer(&orders, &failed);
            return ExitCode::FAILURE;
        }
    };
    let running = Started::Running { pid: Some(child.id().cast_signed()) };
    answer(&orders, &running);
    drop(orders);
    let status = child.wait().unwrap();
    let exit_code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap();
    let word = Ended { exit_code, signal: status.signal(), oom_kills: None };
    writeln!(ended, "{}", serde_json::to_string(&word).unwrap()).unwrap();
    ExitCode::SUCCESS
}
