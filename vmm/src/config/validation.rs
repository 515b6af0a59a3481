//! Validation of well-formed values: the checks that several commands share.

use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;

use fabric_identity::Name;

use super::address::HostPort;
use super::cpu_list::CpuList;
use super::protection::Protection;
pub use super::validation_error::ValidationError;
use crate::config::PAGE_SIZE_BYTES;
use crate::exec::frame::COMMAND_BYTES_MAX;
use crate::machine::{CMDLINE_BYTES_MAX, Irqchip, allowed_cpus, is_of_cmdline};
use crate::size::ByteSize;

/// Resolves an address, and rejects one beyond this host unless `insecure` is set.
///
/// # Errors
///
/// Fails if the name has no address, or one of its addresses is not loopback and `insecure` is
/// false.
pub fn resolve_permitted(
    what: &'static str,
    address: &HostPort,
    insecure: bool,
) -> Result<SocketAddr, ValidationError> {
    let resolved = address
        .resolve()
        .map_err(|source| ValidationError::Unresolvable {
            what,
            address: address.clone(),
            source,
        })?;
    let permitted = insecure || resolved.iter().all(|found| found.ip().is_loopback());
    match resolved.first() {
        Some(first) if permitted => Ok(*first),
        _ => Err(ValidationError::NotLoopback {
            what,
            address: address.clone(),
        }),
    }
}

/// Checks that a node has a name if its certificate is compared with it, and none otherwise.
pub(crate) fn check_named(
    what: &'static str,
    address: &HostPort,
    name: Option<&Name>,
    protection: Protection,
) -> Result<(), ValidationError> {
    let address = address.clone();
    match (protection, name) {
        (Protection::Credentials, None) => Err(ValidationError::Unnamed { what, address }),
        (Protection::None | Protection::Insecure, Some(name)) => {
            let name = name.clone();
            Err(ValidationError::NameWithoutCredentials {
                what,
                address,
                name,
            })
        }
        _ => Ok(()),
    }
}

/// Resolves the address of `--metrics`, if there is one.
pub(crate) fn check_metrics(
    address: Option<&HostPort>,
    insecure: bool,
) -> Result<Option<SocketAddr>, ValidationError> {
    address
        .map(|address| resolve_permitted("--metrics", address, insecure))
        .transpose()
}

/// Checks a size: whole pages, and at least `least`.
pub fn check_size(
    flag: &'static str,
    size: ByteSize,
    least: ByteSize,
) -> Result<(), ValidationError> {
    if size < least {
        return Err(ValidationError::TooSmall {
            flag,
            size,
            limit: least,
        });
    }
    if !size.is_multiple_of(PAGE_SIZE_BYTES) {
        let below = ByteSize::from_bytes(size.bytes() / PAGE_SIZE_BYTES * PAGE_SIZE_BYTES);
        return Err(ValidationError::NotWholePages { flag, size, below });
    }
    Ok(())
}

/// Checks a number against its range, both ends included.
pub fn check_range(
    flag: &'static str,
    value: u32,
    min: u32,
    max: u32,
) -> Result<(), ValidationError> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(ValidationError::OutOfRange {
        flag,
        value: value.into(),
        min: min.into(),
        max: max.into(),
    })
}

/// Checks that each of `cpus` vCPUs has a host CPU that this process may use.
pub(crate) fn check_pinning(pinning: &CpuList, cpus: u32) -> Result<(), ValidationError> {
    let named = pinning.0.len();
    if u32::try_from(named) != Ok(cpus) {
        return Err(ValidationError::PinningCount { named, cpus });
    }
    let allowed = allowed_cpus().map_err(ValidationError::PinningUnknown)?;
    match pinning.0.iter().find(|cpu| !allowed.contains(cpu)) {
        Some(cpu) => Err(ValidationError::PinningNotAllowed {
            cpu: *cpu,
            allowed: CpuList(allowed),
        }),
        None => Ok(()),
    }
}

/// Checks that each of `cpus` vCPUs has a host CPU of its own, and that it can be halted in the guest.
pub(crate) fn check_dedicated(
    pinning: Option<&CpuList>,
    irqchip: Irqchip,
    cpus: u32,
) -> Result<(), ValidationError> {
    if irqchip == Irqchip::User {
        return Err(ValidationError::DedicatedWithUserIrqchip);
    }
    let pinning = pinning.ok_or(ValidationError::DedicatedNotPinned { cpus })?;
    let times = |cpu: &u32| pinning.0.iter().filter(|other| *other == cpu).count();
    match pinning.0.iter().find(|cpu| times(cpu) > 1) {
        Some(cpu) => Err(ValidationError::DedicatedTwice {
            cpu: *cpu,
            times: times(cpu),
        }),
        None => Ok(()),
    }
}

/// Checks that a kernel accepts these parameters in addition to `others` bytes. Few kernels have a
/// lower limit, which is detected when they are loaded.
pub(crate) fn check_cmdline(cmdline: &str, others: usize) -> Result<(), ValidationError> {
    // The limit includes a terminating zero.
    let limit = usize::try_from(CMDLINE_BYTES_MAX - 1).unwrap_or(usize::MAX);
    let limit = limit.saturating_sub(others);
    let bytes = cmdline.len();
    if bytes > limit {
        return Err(ValidationError::CmdlineTooLong { bytes, limit });
    }
    let mut all = cmdline.bytes().enumerate();
    match all.find(|(_, byte)| !is_of_cmdline(*byte)) {
        Some((position, byte)) => Err(ValidationError::CmdlineByte { byte, position }),
        None => Ok(()),
    }
}

/// Checks that a command can be passed to a guest.
pub(crate) fn check_command(command: &str) -> Result<(), ValidationError> {
    let found = match command.len() {
        0 => "no command".to_owned(),
        len if len > COMMAND_BYTES_MAX => format!("{len} bytes"),
        _ if command.contains('\0') => "a zero byte".to_owned(),
        _ => return Ok(()),
    };
    Err(ValidationError::CommandUnusable { found })
}

/// Checks that a file can be read and is not empty.
pub(crate) fn check_file(flag: &'static str, path: &Path) -> Result<(), ValidationError> {
    let metadata = File::open(path)
        .and_then(|file| file.metadata())
        .map_err(|source| ValidationError::FileNotReadable {
            flag,
            path: path.into(),
            source,
        })?;
    let found = match (metadata.is_dir(), metadata.is_file(), metadata.len()) {
        (true, ..) => "a directory",
        (_, true, 0) => "empty",
        _ => return Ok(()),
    };
    Err(ValidationError::FileNotUsable {
        flag,
        path: path.into(),
        found,
    })
}
