//! Files, by Landlock.

use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, RulesetStatus,
};

use crate::Sandbox;

/// The newest version of Landlock whose rights are handled. Older kernels enforce those that they
/// know.
const VERSION: ABI = ABI::V5;

/// What libraries, the resolver and RDMA read of the system. Nothing of it is secret, unlike other
/// files below `/etc`.
const SYSTEM: &[&str] = &[
    "/usr",
    "/bin",
    "/lib",
    "/lib64",
    "/proc",
    "/sys",
    "/etc/gai.conf",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/libibverbs.d",
    "/etc/localtime",
    "/etc/machine-id",
    "/etc/nsswitch.conf",
    "/etc/protocols",
    "/etc/rdma",
    "/etc/resolv.conf",
    "/etc/services",
];

/// Devices that are opened when they are needed, and again after a reboot of the guest. Not all of
/// `/dev`: the host's disks are there.
const DEVICES: &[&str] = &[
    "/dev/hwrng",
    "/dev/infiniband",
    "/dev/kvm",
    "/dev/net/tun",
    "/dev/null",
    "/dev/random",
    "/dev/tty",
    "/dev/urandom",
    "/dev/userfaultfd",
    "/dev/zero",
];

fn of_devices() -> BitFlags<AccessFs> {
    AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::WriteFile | AccessFs::IoctlDev
}

fn of_written_files() -> BitFlags<AccessFs> {
    AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate
}

fn of_directories() -> BitFlags<AccessFs> {
    of_written_files()
        | AccessFs::ReadDir
        | AccessFs::MakeReg
        | AccessFs::MakeSock
        | AccessFs::RemoveFile
}

/// Restricts this thread and those that it starts. Returns what to keep open, or nothing if the kernel
/// cannot.
pub(crate) fn restrict(sandbox: &Sandbox) -> Result<Option<Vec<PathFd>>, RulesetError> {
    // Programs are not executed, and libraries are read.
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let libraries = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let libraries = std::env::split_paths(&libraries).filter(|path| path.is_absolute());
    let mut rules = Rules::default();
    rules.add(SYSTEM.iter().map(PathBuf::from).chain(libraries), read);
    rules.add(DEVICES, of_devices());
    rules.add(&sandbox.read, read);
    let is_block = |path: &&PathBuf| {
        let found = path.metadata();
        found.is_ok_and(|found| found.file_type().is_block_device())
    };
    let (devices, files): (Vec<_>, Vec<_>) = sandbox.write.iter().partition(is_block);
    rules.add(files, of_written_files());
    // Discards are an ioctl of a device.
    rules.add(devices, of_written_files() | AccessFs::IoctlDev);
    rules.add(&sandbox.directories, of_directories());
    let mut ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(VERSION))?
        .create()?;
    for (opened, access) in &rules.0 {
        ruleset = ruleset.add_rule(PathBeneath::new(opened, *access))?;
    }
    let status = ruleset.restrict_self()?;
    let opened = rules.0.into_iter().map(|(opened, _)| opened);
    Ok((status.ruleset != RulesetStatus::NotEnforced).then(|| opened.collect()))
}

/// What is allowed, by descriptors. A rule holds for an inode, and some file systems, such as 9p
/// without a cache, make a new one of a file that is not open: so they stay open.
#[derive(Default)]
struct Rules(Vec<(PathFd, BitFlags<AccessFs>)>);

impl Rules {
    /// What does not exist, or cannot be reached, is left out; and so are pipes and sockets without a
    /// name, of which Landlock restricts nothing, and refuses rules.
    fn add<P: AsRef<Path>>(
        &mut self,
        paths: impl IntoIterator<Item = P>,
        access: BitFlags<AccessFs>,
    ) {
        for path in paths {
            let path = path.as_ref();
            let is_directory = path.is_dir();
            if let Ok(opened) = PathFd::new(path)
                && !is_nameless(&opened)
            {
                let possible = if is_directory {
                    access
                } else {
                    access & AccessFs::from_file(VERSION)
                };
                self.0.push((opened, possible));
            }
        }
    }
}

/// Whether a file is in a file system of the kernel's own, such as what `/dev/stdout` is in a pipeline.
fn is_nameless(opened: &PathFd) -> bool {
    // From linux/magic.h.
    const PIPEFS_MAGIC: u64 = 0x5049_5045;
    const SOCKFS_MAGIC: u64 = 0x534f_434b;
    rustix::fs::fstatfs(opened).is_ok_and(|found| {
        let kind = u64::try_from(found.f_type);
        kind.is_ok_and(|kind| [PIPEFS_MAGIC, SOCKFS_MAGIC].contains(&kind))
    })
}
