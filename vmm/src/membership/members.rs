//! The nodes of an etcd as donors of a VM.

mod join;

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use fabric_host::lock;
use fabric_identity::Name;
use memory_fabric::BLOCK_BYTES;
use memory_fabric::fabric::{DonorAddress, Redundancy, TransportKind};
use ssi_hv_membership::{
    Carrier, Endpoints, EtcdError, Found, Member, Target, Watch, Watched, find,
};

use super::choose::{Candidate, Need, choose};
use super::rests::Rests;
use super::spares::{Distrusted, Known, Remembered};
use crate::config::address::{Donor, HostPort};
use crate::config::membership::MembershipError;
use crate::config::resolver::{ResolveError, resolved_until};
use crate::config::{Protection, ResolvedDonor, RunSettings, ValidationError, resolved_donor};
use crate::exit::ExitCode;
use crate::failure::{Failure, describe};
use crate::size::ByteSize;

/// Deadline for the list of nodes, before the guest exists.
pub(super) const FIND_TIME_MAX: Duration = Duration::from_secs(10);
/// The same for a new list when a node did not lend: the old one is used otherwise.
const AGAIN_TIME_MAX: Duration = Duration::from_secs(3);
/// Nodes that an error names.
const NAMED_MAX: usize = 8;

/// Why the nodes of an etcd cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MembersError {
    /// There is no answer.
    #[error("no nodes by --cluster {target}; name some with --donor HOST:PORT to do without it")]
    Etcd {
        /// The etcd.
        target: Target,
        /// Why not.
        source: EtcdError,
    },
    /// They lend too little.
    #[error(
        "--cluster {target}: {wanted} of the guest's memory, beyond --local-memory, are to be on nodes{how}, and what is there does not suffice: {there}; start more nodes, or raise --local-memory"
    )]
    TooLittle {
        /// The etcd.
        target: Target,
        /// How much.
        wanted: ByteSize,
        /// In which form.
        how: String,
        /// What each node has.
        there: String,
    },
}

/// The nodes of an etcd, for a VM that uses some of them.
#[derive(Debug)]
pub struct Members {
    target: Target,
    endpoints: Endpoints,
    /// Those of the VM, without donors.
    settings: RunSettings,
    need: Need,
    state: Mutex<State>,
    /// Follows it while the VM runs.
    watch: OnceLock<Watch>,
}

#[derive(Debug)]
struct State {
    found: Found,
    /// Nodes that did not lend at this start of the guest.
    left_out: HashSet<SocketAddr>,
    /// Nodes that sent wrong pieces of pages: they are not used again.
    distrusted: Distrusted,
    /// Those that were chosen, or offered while the VM runs.
    known: Remembered,
    /// Nodes that were lost again and again: they are not asked to join for a while.
    rests: Rests,
    /// What donors of the VM had free before they lent: what they lent is free again at this start.
    own: BTreeMap<Name, u64>,
}

impl State {
    /// Notes that a start with these donors failed, because of one or of all, and the nodes since then.
    fn note_failed(
        &mut self,
        failed: Option<SocketAddr>,
        used: &[DonorAddress],
        found: Option<Found>,
    ) {
        self.left_out.extend(failed);
        for known in used.iter().filter_map(|one| self.known.get(&one.address)) {
            let own = self.own.entry(known.name.clone());
            own.or_insert(known.free_bytes);
        }
        if let Some(found) = found {
            self.found = found;
        }
        // That their loans have ended is listed a second later.
        for (name, before) in &self.own {
            if let Some(member) = self.found.members.get_mut(name) {
                member.free_bytes = member.free_bytes.max(*before).min(member.memory_bytes);
            }
        }
    }
}

impl Members {
    /// Finds donors for a VM whose `--cluster` is an etcd; `None` if it is not. Returns the settings
    /// with these donors.
    ///
    /// # Errors
    ///
    /// Fails when the settings cannot be used, etcd does not answer in time, or the nodes there lend
    /// too little.
    pub fn find(settings: &RunSettings) -> Result<Option<(RunSettings, Self)>, Failure> {
        let Some(target) = etcd_of(settings)? else {
            return Ok(None);
        };
        let need = checked_need(settings)?;
        let credentials = settings.cluster_credentials.as_deref();
        let endpoints = target.endpoints(credentials, settings.insecure);
        let endpoints = endpoints.map_err(MembershipError::from);
        let endpoints = endpoints.map_err(ValidationError::from)?;
        let found = find(&endpoints, FIND_TIME_MAX).map_err(|source| {
            let target = target.clone();
            Failure::new(
                ExitCode::DonorUnavailable,
                MembersError::Etcd { target, source },
            )
        })?;
        for problem in &found.problems {
            tracing::warn!("an entry of etcd is left out: {problem}");
        }
        let state = State {
            found,
            left_out: HashSet::new(),
            distrusted: Distrusted::default(),
            known: Remembered::new(),
            rests: Rests::default(),
            own: BTreeMap::new(),
        };
        let members = Self {
            target,
            endpoints,
            settings: RunSettings {
                cluster: None,
                ..settings.clone()
            },
            need,
            state: Mutex::new(state),
            watch: OnceLock::new(),
        };
        let donors = members.chosen();
        let donors = donors.map_err(|error| Failure::new(ExitCode::DonorUnavailable, error))?;
        let names: Vec<_> = donors
            .iter()
            .map(|donor| donor.address.to_string())
            .collect();
        tracing::info!("donors by {}: {}", members.target, names.join(", "));
        let mut settings = members.settings.clone();
        settings.donors = donors;
        Ok(Some((settings, members)))
    }

    /// Begins another start of the guest: a node that did not lend at an earlier one may do so now.
    pub fn ask_all_again(&self) {
        let mut state = lock(&self.state);
        state.left_out.clear();
        state.own.clear();
    }

    /// Returns donors by a new list in place of those that the VM used, without one that did not lend: it
    /// was lost, or has lent its memory since it was listed.
    ///
    /// # Errors
    ///
    /// Fails when the others do not suffice.
    pub fn without(
        &self,
        failed: Option<SocketAddr>,
        used: &[DonorAddress],
    ) -> Result<Vec<ResolvedDonor>, MembersError> {
        let found = match find(&self.endpoints, AGAIN_TIME_MAX) {
            Ok(found) => Some(found),
            Err(error) => {
                tracing::warn!("the nodes that were known last are used: {error}");
                self.now().map(|now| now.found)
            }
        };
        lock(&self.state).note_failed(failed, used, found);
        let resolved = self.chosen()?.into_iter();
        // Each was resolved when it was chosen.
        Ok(resolved
            .filter_map(|donor| self.resolved(&donor).ok())
            .collect())
    }

    /// Begins to follow the changes of the cluster.
    ///
    /// # Errors
    ///
    /// Fails when the host has no thread or descriptor left.
    pub fn follow(&self) -> Result<(), EtcdError> {
        let found = lock(&self.state).found.clone();
        let watch = Watch::start(&self.endpoints, found, || {})?;
        // A VM begins once.
        let _ = self.watch.set(watch);
        Ok(())
    }

    /// Returns what is known of the cluster now.
    #[must_use]
    pub fn now(&self) -> Option<Watched> {
        self.watch.get().map(Watch::now)
    }

    fn resolved(&self, donor: &Donor) -> Result<ResolvedDonor, ValidationError> {
        resolved_donor(donor, self.settings.transport, self.protection())
    }

    /// Resolves the address of a node until a deadline.
    fn resolved_by(&self, donor: &Donor, until: Instant) -> Result<ResolvedDonor, String> {
        // At the start there are no other threads yet, and the guest does not wait.
        if donor.address.is_numeric() || self.watch.get().is_none() {
            return self.resolved(donor).map_err(|error| describe(&error));
        }
        let resolved = resolved_until(donor, self.settings.transport, self.protection(), until);
        resolved.map_err(|error| match error {
            ResolveError::Late { .. } => not_resolved(),
            error => describe(&error),
        })
    }

    const fn protection(&self) -> Protection {
        Protection::of(self.settings.credentials.is_some(), self.settings.insecure)
    }

    fn chosen(&self) -> Result<Vec<Donor>, MembersError> {
        let mut state = lock(&self.state);
        let (mut candidates, mut refusals) = (Vec::new(), Vec::new());
        let mut known = Remembered::new();
        let mut taken = state.left_out.clone();
        let until = Instant::now() + FIND_TIME_MAX;
        for (name, member) in &state.found.members {
            match self.candidate(name, member, until) {
                Ok((_, address)) if state.left_out.contains(&address) => {
                    refusals.push(format!("{name}: it did not lend"));
                }
                Ok((_, address)) if state.distrusted.has(name, address) => {
                    refusals.push(format!("{name}: it sent wrong pieces of pages"));
                }
                // A node that was started again under another name, or an entry that is not true.
                Ok((_, address)) if !taken.insert(address) => {
                    refusals.push(format!("{name}: another node has its address {address}"));
                }
                Ok((candidate, address)) => {
                    known.insert(address, Known::from(&candidate));
                    candidates.push(candidate);
                }
                Err(reason) => refusals.push(format!("{name}: {reason}")),
            }
        }
        state.known = known;
        choose(self.need, &candidates).ok_or_else(|| MembersError::TooLittle {
            target: self.target.clone(),
            wanted: ByteSize::from_bytes(u64::from(self.need.blocks) * BLOCK_BYTES),
            how: match self.need.redundancy {
                Redundancy::None => String::new(),
                Redundancy::Copies => " in two copies".to_owned(),
                Redundancy::Stripes(layout) => format!(" in stripes of {layout}"),
            },
            there: there(&candidates, &refusals),
        })
    }

    /// Returns how the VM would use a node, and its address, or why it cannot. Names of hosts are
    /// resolved until a deadline.
    fn candidate(
        &self,
        name: &Name,
        member: &Member,
        until: Instant,
    ) -> Result<(Candidate, SocketAddr), String> {
        let settings = &self.settings;
        if member.wire != fabric_wire::VERSION {
            return Err(format!(
                "release {} speaks version {} of the protocol, not {}",
                member.release,
                member.wire,
                fabric_wire::VERSION
            ));
        }
        let has_credentials = settings.credentials.is_some();
        match (member.certificates, has_credentials) {
            (true, false) => return Err("it needs --credentials DIR".to_owned()),
            (false, true) => return Err("it has no certificate".to_owned()),
            _ => {}
        }
        let (carrier, word) = match settings.transport {
            TransportKind::Udp => (Carrier::Udp, "UDP"),
            TransportKind::Rdma | TransportKind::Hybrid => (Carrier::Rdma, "RDMA"),
            _ => (Carrier::Tcp, "TCP"),
        };
        if !member.transports.contains(&carrier) {
            return Err(format!("it has no {word}"));
        }
        let address: HostPort = member.address.parse().map_err(|error| format!("{error}"))?;
        if !address.is_numeric() && Instant::now() > until {
            return Err(not_resolved());
        }
        let is_pinned = settings.transport == TransportKind::Udp && !has_credentials;
        let zone = member.zone();
        let has_copies = matches!(self.need.redundancy, Redundancy::Copies);
        let donor = Donor {
            address,
            memory: None,
            fingerprint: member.fingerprint().filter(|_| is_pinned),
            name: has_credentials.then(|| name.clone()),
            zone: zone.clone().filter(|_| has_copies),
        };
        let resolved = self.resolved_by(&donor, until)?;
        let candidate = Candidate {
            name: name.clone(),
            // A name may have another address later.
            donor: Donor {
                address: resolved.address.into(),
                ..donor
            },
            free_bytes: member.free_bytes,
            zone,
        };
        Ok((candidate, resolved.address))
    }
}

/// Why a node that has the name of a host is left out.
fn not_resolved() -> String {
    let limit = FIND_TIME_MAX.as_secs();
    format!("its host's name was not resolved: that, and those before, took {limit} s")
}

/// Returns the etcd of `--cluster`.
fn etcd_of(settings: &RunSettings) -> Result<Option<Target>, ValidationError> {
    let text = settings.cluster.as_ref().map(|path| path.to_string_lossy());
    match text.filter(|text| Target::is_meant(text)) {
        Some(text) => {
            let target = text.parse::<Target>().map_err(MembershipError::from)?;
            Ok(Some(target))
        }
        None if settings.cluster_credentials.is_some() => {
            Err(MembershipError::WithoutCluster("--cluster-credentials").into())
        }
        None => Ok(None),
    }
}

/// Returns what a VM needs of the nodes of an etcd.
fn checked_need(settings: &RunSettings) -> Result<Need, ValidationError> {
    let given = [
        (!settings.donors.is_empty(), "--donor"),
        (!settings.nodes.is_empty(), "--node"),
        (
            settings.transport == TransportKind::Loopback,
            "--transport loopback",
        ),
    ];
    if let Some((_, flag)) = given.into_iter().find(|(is_given, _)| *is_given) {
        return Err(MembershipError::NotWithEtcd(flag).into());
    }
    let memory = settings.memory;
    let local = settings.local_memory;
    let local = local.ok_or(MembershipError::LocalMemoryNotGiven(memory))?;
    let missing = memory.saturating_sub(local);
    if missing == ByteSize::ZERO {
        return Err(MembershipError::NothingForNodes { local, memory }.into());
    }
    let redundancy = match (settings.redundancy, settings.replicas) {
        (Some(stripes), _) => Redundancy::Stripes(stripes.0),
        (None, 2..) => Redundancy::Copies,
        (None, _) => Redundancy::None,
    };
    // More than the limit of memory is refused later, by its flag.
    let blocks = u32::try_from(missing.bytes().div_ceil(BLOCK_BYTES)).unwrap_or(u32::MAX);
    Ok(Need { blocks, redundancy })
}

/// Describes the nodes for an error.
fn there(candidates: &[Candidate], refusals: &[String]) -> String {
    let free = |one: &Candidate| {
        let free = ByteSize::from_bytes(one.free_bytes);
        format!("{} has {free} free", one.name)
    };
    let all: Vec<_> = candidates
        .iter()
        .map(free)
        .chain(refusals.iter().cloned())
        .collect();
    if all.is_empty() {
        return "no node is registered".to_owned();
    }
    let mut text = all[..all.len().min(NAMED_MAX)].join(", ");
    if all.len() > NAMED_MAX {
        // Writing to a string does not fail.
        let _ = write!(text, ", and {} more", all.len() - NAMED_MAX);
    }
    text
}

#[cfg(test)]
mod tests;
