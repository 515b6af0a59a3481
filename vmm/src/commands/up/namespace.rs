//! Unnamed network namespaces: the kernel removes them, and their cables, with the last process in
//! them.

use std::fs::File;
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context as _, Result, anyhow, bail};
use ssi_hv::cluster::NAMESPACE_NETWORK;

use super::before_exec;

/// Name of the cable's end in the namespace.
const INNER_NAME: &str = "eth0";
/// Number of address pairs: the network has a prefix of 15 bits.
const PAIRS: u32 = 1 << 16;

/// A namespace and its address. It exists while this value or a process in it does.
#[derive(Debug)]
pub struct Namespace {
    namespace: File,
    /// The address of the other end is one less.
    pub address: Ipv4Addr,
}

impl Namespace {
    /// Creates the `index`th namespace of this process, with a cable to this host.
    pub fn create(index: usize) -> Result<Self> {
        let outer_name = format!("ssi{}-{index}", std::process::id());
        let outer = outer_name.clone();
        let make = move || -> Result<(File, Ipv4Addr)> {
            before_exec::new_network()
                .context("cannot make a network namespace; namespace = true needs root")?;
            let namespace = File::open("/proc/thread-self/ns/net")?;
            let home = std::process::id().to_string();
            ip(&["link", "set", "lo", "up"])?;
            let pair = ["type", "veth", "peer", "name", &outer, "netns", &home];
            ip(&[&["link", "add", INNER_NAME][..], &pair].concat())?;
            let address = inner_address(&outer)?;
            let with_prefix = format!("{address}/31");
            ip(&["address", "add", &with_prefix, "dev", INNER_NAME])?;
            ip(&["link", "set", INNER_NAME, "up"])?;
            Ok((namespace, address))
        };
        // On a separate thread, since it cannot leave the namespace.
        let made = thread::Builder::new()
            .name("namespace".into())
            .spawn(make)?
            .join();
        let (namespace, address) = made.map_err(|_| anyhow!("a thread failed"))??;
        let other = Ipv4Addr::from_bits(address.to_bits() - 1);
        ip(&["address", "add", &format!("{other}/31"), "dev", &outer_name])?;
        ip(&["link", "set", &outer_name, "up"])?;
        Ok(Self { namespace, address })
    }

    /// Makes a process start in the namespace.
    pub fn enter(&self, command: &mut Command) -> Result<()> {
        before_exec::enter_network(command, self.namespace.try_clone()?);
        Ok(())
    }
}

/// Returns an address that is unique among such cables: it uses the interface's number, which is
/// unique on this host. It is odd, so that the address of the other end is one less.
fn inner_address(outer: &str) -> Result<Ipv4Addr> {
    // The thread is in another namespace, but `/sys` shows the one in which it was mounted.
    let path = format!("/sys/class/net/{outer}/ifindex");
    let index: u32 = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {path}"))?
        .trim()
        .parse()?;
    Ok(address_of(index))
}

fn address_of(index: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(NAMESPACE_NETWORK.to_bits() + 2 * (index % PAIRS) + 1)
}

/// Runs `ip` of iproute2.
fn ip(arguments: &[&str]) -> Result<()> {
    let output = Command::new("ip")
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .context("cannot run ip, which namespace = true needs; install iproute2")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("ip {}: {}", arguments.join(" "), said.trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_pairs_in_the_network_that_is_for_tests() {
        assert_eq!(address_of(1), Ipv4Addr::new(198, 18, 0, 3));
        assert_eq!(address_of(PAIRS - 1), Ipv4Addr::new(198, 19, 255, 255));
        assert_eq!(address_of(PAIRS), Ipv4Addr::new(198, 18, 0, 1));
        for index in [1, 2, 77, PAIRS - 1] {
            assert_eq!(address_of(index).to_bits() & 1, 1);
        }
    }
}
