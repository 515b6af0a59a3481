//! Files, by Landlock.

use landlock::{
    ABI, Access, AccessFs, BitFlags, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError,
    RulesetStatus, path_beneath_rules,
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

/// Restricts this thread and those that it starts. Returns whether the kernel can.
pub(crate) fn restrict(sandbox: &Sandbox) -> Result<bool, RulesetError> {
    // Programs are not executed, and libraries are read.
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let libraries = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let libraries = std::env::split_paths(&libraries).filter(|path| path.is_absolute());
    // A path that does not exist is left out.
    let status = Ruleset::default()
        .handle_access(AccessFs::from_all(VERSION))?
        .create()?
        .add_rules(path_beneath_rules(SYSTEM, read))?
        .add_rules(path_beneath_rules(libraries, read))?
        .add_rules(path_beneath_rules(DEVICES, of_devices()))?
        .add_rules(path_beneath_rules(&sandbox.read, read))?
        .add_rules(path_beneath_rules(&sandbox.write, of_written_files()))?
        .add_rules(path_beneath_rules(&sandbox.directories, of_directories()))?
        .restrict_self()?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}
