//! `ssi-hv nodes`.

use std::fmt::Write as _;

use ssi_hv::exit::ExitCode;
use ssi_hv::membership::listing::{Listing, list};

use super::{Failure, print};
use crate::cli::nodes::NodesConfig;

/// Lists the nodes that are registered in an etcd.
pub fn nodes(config: &NodesConfig) -> Result<ExitCode, Failure> {
    let credentials = config.cluster_credentials.as_deref();
    let listing = list(&config.cluster, credentials, config.insecure)?;
    if config.json {
        print(&format!("{}\n", serde_json::to_string_pretty(&listing)?))?;
    } else {
        print(&text(&listing))?;
    }
    for problem in &listing.problems {
        tracing::warn!("an entry of etcd is left out: {problem}");
    }
    Ok(ExitCode::Success)
}

fn text(listing: &Listing) -> String {
    if listing.nodes.is_empty() {
        return "no node is registered\n".to_owned();
    }
    let mut text = String::new();
    for node in &listing.nodes {
        let member = &node.member;
        let (free, memory) = (node.free(), node.memory());
        let zone = member.zone.as_deref().unwrap_or("-");
        let certificates = if member.certificates {
            ", certificates"
        } else {
            ""
        };
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{:<16} {:<24} {free} of {memory} free, zone {zone}, {} vCPU(s), release {}{certificates}",
            node.name, member.address, member.cpus, member.release,
        );
    }
    text
}
