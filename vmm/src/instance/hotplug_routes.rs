//! The routes of added memory: `GET` and `PUT /v1/hotplug`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use devices::virtio::MEM_BLOCK_BYTES;
use memory_fabric::fabric::{DonorAddress, Redundancy};
use ssi_hv_sandbox::Privileges;

use super::hotplug::{HotplugMemory, refusal};
use super::vm::{BootedVm, Instance};
use crate::config::address::Donor;
use crate::config::resolver::{ResolveError, resolved_until};
use crate::config::{Protection, RunConfig};
use crate::control_socket::changes::{NextChange, Seen};
use crate::control_socket::protocol::{CHANGE_WAIT_TIME_MAX, HotplugTarget, Refusal, RefusalCode};
use crate::control_socket::route::{Answer, answer};
use crate::host;
use crate::size::ByteSize;

/// How long the names of all donors of a request may take to resolve: changes of the VM wait meanwhile.
const RESOLVE_TIME_MAX: Duration = Duration::from_secs(5);
const _: () = assert!(RESOLVE_TIME_MAX.as_secs() < CHANGE_WAIT_TIME_MAX.as_secs());

/// Until when a request that names donors does what takes long.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Their names are resolved.
    pub names: Instant,
    /// It is answered.
    pub answer: Instant,
}

impl Limits {
    /// Those of a request that begins now.
    pub fn begin() -> Self {
        let now = Instant::now();
        Self {
            names: now + RESOLVE_TIME_MAX,
            answer: now + CHANGE_WAIT_TIME_MAX,
        }
    }
}

/// Returns how much can be added, was requested, and is plugged.
pub fn look(instance: &Instance) -> Answer {
    let booted = instance.booted()?;
    answer(200, &memory_of(&booted)?.body())
}

/// Returns the change that a request with parameters waits for.
pub fn next_change(instance: &Arc<Instance>, query: &str) -> Result<NextChange, Refusal> {
    let seen = Seen::parse(query)?;
    let booted = instance.booted()?;
    Ok(memory_of(&booted)?.changes().after(seen))
}

fn memory_of(booted: &BootedVm) -> Result<&HotplugMemory, Refusal> {
    let state = |text| Refusal::new(RefusalCode::State, text);
    let memory = booted.hotplug.as_ref().ok_or_else(|| {
        state("the VM was started without --hotplug-memory SIZE, so it has no addresses for more")
    })?;
    if memory.has_ended() {
        return Err(state("the guest has ended"));
    }
    Ok(memory)
}

/// Requests a size from the guest.
pub fn set(instance: &Arc<Instance>, body: &[u8]) -> Answer {
    let malformed = |text: String| Refusal::new(RefusalCode::Malformed, text);
    let target: HotplugTarget = serde_json::from_slice(body).map_err(|error| {
        malformed(format!(
            "not {{\"requested_bytes\": NUMBER, \"donor\": \"HOST:PORT\"}}: {error}"
        ))
    })?;
    let donor = target.donor.as_deref();
    let limits = Limits::begin();
    let donor = donor.map(|text| donor_address(&instance.config, text, limits.names));
    let donor = donor.transpose()?;
    let booted = instance.booted()?;
    let memory = memory_of(&booted)?;
    let machine = booted.machine()?;
    let bytes = target.requested_bytes;
    let limit = memory.device.region().bytes;
    if !bytes.is_multiple_of(MEM_BLOCK_BYTES) || bytes > limit {
        return Err(malformed(format!(
            "{} is not whole blocks of {} up to {}, which is --hotplug-memory",
            ByteSize::from_bytes(bytes),
            ByteSize::from_bytes(MEM_BLOCK_BYTES),
            ByteSize::from_bytes(limit)
        )));
    }
    match donor {
        None => {
            fits_here(memory, bytes)?;
            let asked = memory.ask(bytes, None, machine);
            asked.map_err(|error| refusal(&error))?;
        }
        Some((address, name)) => memory.ask_with(bytes, address, name, machine, limits.answer)?,
    }
    answer(202, &memory.body())
}

/// Returns the address of a donor that is to join, and its name in messages. Its name is resolved
/// `until` then.
pub fn donor_address(
    config: &RunConfig,
    text: &str,
    until: Instant,
) -> Result<(DonorAddress, String), Refusal> {
    let malformed = |text: String| Refusal::new(RefusalCode::Malformed, text);
    let donor: Donor = text
        .parse()
        .map_err(|error| malformed(format!("{error}")))?;
    if donor.memory.is_some() {
        let text = "a donor that joins is asked for what is missing; omit memory=";
        return Err(malformed(text.to_owned()));
    }
    joining_donor(config, &donor, until)
}

/// The same for one that may be named with what it lends.
pub fn joining_donor(
    config: &RunConfig,
    donor: &Donor,
    until: Instant,
) -> Result<(DonorAddress, String), Refusal> {
    let malformed = |text: String| Refusal::new(RefusalCode::Malformed, text);
    if let Some(zone) = donor
        .zone
        .as_ref()
        .filter(|_| config.redundancy != Redundancy::Copies)
    {
        let address = &donor.address;
        return Err(malformed(format!(
            "donor {address} has zone={zone}, which only two copies use; omit zone="
        )));
    }
    check_still_possible(config, donor)?;
    let protection = Protection::of(config.credentials.is_some(), config.insecure);
    let resolved = resolved_until(donor, config.transport, protection, until);
    let resolved = resolved.map_err(|error| match &error {
        ResolveError::Invalid(wrong) => malformed(one_line(wrong)),
        ResolveError::Late { .. } | ResolveError::Thread(_) => {
            let (text, limit) = (one_line(&error), RESOLVE_TIME_MAX.as_secs());
            let text = format!("{text}; all names of a request have {limit} s");
            Refusal::new(RefusalCode::Failed, text)
        }
    })?;
    let address = DonorAddress {
        address: resolved.address,
        name: resolved.identity,
        fingerprint: resolved.fingerprint,
        zone: resolved.zone.map(|zone| zone.to_string()),
        bytes: donor.memory.map(ByteSize::bytes),
    };
    Ok((address, donor.address.to_string()))
}

/// Refuses what needs files of the host, if the process has another root by now.
fn check_still_possible(config: &RunConfig, donor: &Donor) -> Result<(), Refusal> {
    let privileges = config.privileges.as_ref();
    if privileges.and_then(Privileges::root).is_none() {
        return Ok(());
    }
    let address = &donor.address;
    if address.is_numeric() {
        return Ok(());
    }
    let text = format!(
        "{address} is a name, and a VM with --chroot resolves no names once it runs; give the address"
    );
    Err(Refusal::new(RefusalCode::State, text))
}

fn one_line(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// Refuses a size for which this host has no memory at the moment.
fn fits_here(memory: &HotplugMemory, bytes: u64) -> Result<(), Refusal> {
    let missing = memory.missing_bytes(bytes);
    match host::available_memory() {
        Some(available) if missing > available.bytes() => Err(Refusal::new(
            RefusalCode::State,
            format!(
                "{} of this host's memory are wanted, and {} are available; name a donor that \
                 lends it, or ask for less",
                ByteSize::from_bytes(missing),
                available
            ),
        )),
        _ => Ok(()),
    }
}
