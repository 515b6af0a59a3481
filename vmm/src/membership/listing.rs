//! The nodes of an etcd as they are listed.

use std::path::Path;

use serde::Serialize;
use ssi_hv_membership::{Member, Target, find};

use super::members::FIND_TIME_MAX;
use crate::config::ValidationError;
use crate::config::membership::MembershipError;
use crate::failure::Failure;
use crate::size::ByteSize;

/// A node of a cluster.
#[derive(Clone, Debug, Serialize)]
pub struct ListedNode {
    /// Its name.
    pub name: String,
    /// What it registered.
    #[serde(flatten)]
    pub member: Member,
}

impl ListedNode {
    /// Returns the memory that no VM has.
    #[must_use]
    pub const fn free(&self) -> ByteSize {
        ByteSize::from_bytes(self.member.free_bytes)
    }

    /// Returns the memory that it lends in all.
    #[must_use]
    pub const fn memory(&self) -> ByteSize {
        ByteSize::from_bytes(self.member.memory_bytes)
    }
}

/// The nodes of a cluster.
#[derive(Clone, Debug, Serialize)]
pub struct Listing {
    /// By name.
    pub nodes: Vec<ListedNode>,
    /// A line for each entry that was left out.
    pub problems: Vec<String>,
}

/// Lists the nodes of an etcd.
///
/// # Errors
///
/// Fails when its address or the credentials cannot be used, or it does not answer in time.
pub fn list(cluster: &str, credentials: Option<&Path>, insecure: bool) -> Result<Listing, Failure> {
    let target = cluster.parse::<Target>().map_err(MembershipError::from);
    let target = target.map_err(ValidationError::from)?;
    let endpoints = target.endpoints(credentials, insecure);
    let endpoints = endpoints.map_err(MembershipError::from);
    let endpoints = endpoints.map_err(ValidationError::from)?;
    let found = find(&endpoints, FIND_TIME_MAX)?;
    let nodes = found.members.into_iter().map(|(name, member)| ListedNode {
        name: name.to_string(),
        member,
    });
    Ok(Listing {
        nodes: nodes.collect(),
        problems: found.problems,
    })
}
