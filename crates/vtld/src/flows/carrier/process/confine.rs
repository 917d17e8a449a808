//! Sandbox of a process of carriers: no capabilities, and no system calls but those that move bytes through the
//! descriptors that it was given (seccomp).

use std::{collections::BTreeMap, fs, io};

use caps::CapSet;
use nix::sys::{
    prctl,
    signal::{SigSet, Signal},
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

/// System calls allowed without conditions.
const CALLS: &[libc::c_long] = &[
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_getsockopt,
    libc::SYS_getsockname,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    libc::SYS_futex,
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Drops all capabilities, and has the process killed when the thread that started it ends. Call it before starting
/// threads.
///
/// # Errors
/// The system refuses.
pub fn drop_privileges() -> io::Result<()> {
    // vtld ends it, so that the peers are told first: block the signals.
    SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]).thread_block()?;
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    // Killed first when memory is short: flows go on without it. Failure is harmless.
    let _ = fs::write("/proc/self/oom_score_adj", "500");
    // It was started as /proc/self/exe.
    prctl::set_name(c"vtld-carriers")?;
    // Its memory has keys: no core dumps, no ptrace.
    prctl::set_dumpable(false)?;
    prctl::set_no_new_privs()?;
    for set in [
        CapSet::Ambient,
        CapSet::Inheritable,
        CapSet::Effective,
        CapSet::Permitted,
    ] {
        caps::clear(None, set).map_err(io::Error::other)?;
    }
    Ok(())
}

/// Socket calls, and the index of their flags argument.
const OF_SOCKETS: [(libc::c_long, u8); 6] = [
    (libc::SYS_recvfrom, 3),
    (libc::SYS_recvmsg, 2),
    (libc::SYS_recvmmsg, 3),
    (libc::SYS_sendto, 3),
    (libc::SYS_sendmsg, 2),
    (libc::SYS_sendmmsg, 3),
];

/// Installs the seccomp filter in all threads, which must have been started; refused calls fail with EPERM.
pub(super) fn forbid_calls() -> io::Result<()> {
    seccompiler::apply_filter_all_threads(&filter().map_err(io::Error::other)?)
        .map_err(io::Error::other)
}

fn filter() -> Result<BpfProgram, seccompiler::BackendError> {
    use SeccompCmpArgLen::Dword;
    let is = |argument, value: u32| {
        SeccompCondition::new(argument, Dword, SeccompCmpOp::Eq, value.into())
            .and_then(|c| SeccompRule::new(vec![c]))
    };
    let never = |argument, bits: i32| {
        let op = SeccompCmpOp::MaskedEq(bits as u64);
        SeccompCondition::new(argument, Dword, op, 0).and_then(|c| SeccompRule::new(vec![c]))
    };
    let mut rules: BTreeMap<_, _> = CALLS.iter().map(|call| (*call, Vec::new())).collect();
    for (call, flags) in OF_SOCKETS {
        // Not needed, and kernel bugs in MSG_OOB have allowed escapes from sandboxes.
        rules.insert(call, vec![never(flags, libc::MSG_OOB)?]);
    }
    let of_files = [libc::F_GETFL, libc::F_SETFL, libc::F_GETFD, libc::F_SETFD];
    let of_files: Result<_, _> = of_files
        .into_iter()
        .map(|command| is(1, command as u32))
        .collect();
    rules.insert(libc::SYS_fcntl, of_files?);
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![never(2, libc::PROT_EXEC)?]);
    }
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(
        rules,
        SeccompAction::Errno(libc::EPERM as u32),
        SeccompAction::Allow,
        arch,
    )?
    .try_into()
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{Read, Write},
        net::{Shutdown, TcpStream, UdpSocket},
        os::unix::net::UnixStream,
        process::Command,
    };

    use nix::{
        sys::{
            signal::kill,
            wait::{WaitStatus, waitpid},
        },
        unistd::{ForkResult, Pid, fork},
    };

    use super::*;

    /// The first thing that a confined process may do, or may not, against expectation.
    fn wrong(mut given: UnixStream, mut other: UnixStream) -> Option<&'static str> {
        let refused = |error: io::Error| error.raw_os_error() == Some(libc::EPERM);
        let of_errno = |errno: nix::Error| errno == nix::Error::EPERM;
        let mut byte = [0];
        // SAFETY: memory of its own, if the kernel gives any.
        let executable = unsafe {
            let prot = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), 4096, prot, flags, -1, 0)
        };
        let capabilities = caps::read(None, CapSet::Permitted);
        let all = [
            (given.write_all(&[7]).is_ok(), "it cannot write"),
            (
                other.read_exact(&mut byte).is_ok() && byte == [7],
                "it cannot read",
            ),
            (
                given.shutdown(Shutdown::Both).is_err_and(refused),
                "it spoils sockets",
            ),
            (
                File::open("/etc/passwd").is_err_and(refused),
                "it opens files",
            ),
            (
                UdpSocket::bind("127.0.0.1:0").is_err_and(refused),
                "it has sockets",
            ),
            (
                TcpStream::connect("127.0.0.1:9").is_err_and(refused),
                "it connects",
            ),
            (
                UnixStream::pair().is_err_and(refused),
                "it has pairs of sockets",
            ),
            (
                kill(Pid::parent(), None).is_err_and(of_errno),
                "it sends signals",
            ),
            (
                Command::new("/bin/true").status().is_err_and(refused),
                "it runs programs",
            ),
            (executable == libc::MAP_FAILED, "it has code of its own"),
            (
                capabilities.is_err() || capabilities.is_ok_and(|c| c.is_empty()),
                "it is privileged",
            ),
        ];
        all.into_iter()
            .find_map(|(good, what)| (!good).then_some(what))
    }

    #[test]
    fn confined__process_moves_bytes_and_no_more() {
        let (given, other) = UnixStream::pair().unwrap();
        // SAFETY: the child calls nothing that needs threads of this process.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let confined = drop_privileges().and_then(|()| forbid_calls());
                let what = match confined {
                    Ok(()) => wrong(given, other),
                    Err(_) => Some("it cannot be confined"),
                };
                if let Some(what) = what {
                    let _ = writeln!(io::stderr(), "{what}");
                }
                // SAFETY: nothing of the parent's is flushed or run.
                unsafe { libc::_exit(i32::from(what.is_some())) }
            }
            ForkResult::Parent { child } => {
                assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0)));
            }
        }
    }
}
