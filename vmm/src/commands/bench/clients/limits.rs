//! The limits of this host that may be in the way of many clients.

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Resource, getrlimit};

/// Open files of a node, and of this process, beside those of clients.
const FILES_BESIDE: u64 = 100;

/// The file with the ports that connections get.
const PORTS: &str = "/proc/sys/net/ipv4/ip_local_port_range";

/// Checks that there can be so many clients.
pub(super) fn check(clients: u32) -> Result<()> {
    // It has been raised as far as is allowed, as the node raises its own.
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    check_files(clients, files)?;
    let ports = std::fs::read_to_string(PORTS).context(PORTS)?;
    check_ports(clients, &ports)
}

fn check_files(clients: u32, files: u64) -> Result<()> {
    let needed = u64::from(clients) + FILES_BESIDE;
    ensure!(
        needed <= files,
        "--clients {clients}: a process needs {needed} open files for so many, and {files} is the hard \
         limit here (`ulimit -Hn`): use --clients {} or fewer, or raise it, as with LimitNOFILE= of \
         systemd",
        files.saturating_sub(FILES_BESIDE),
    );
    Ok(())
}

fn check_ports(clients: u32, range: &str) -> Result<()> {
    let mut ends = range.split_whitespace().map(str::parse::<u32>);
    let (Some(Ok(first)), Some(Ok(last))) = (ends.next(), ends.next()) else {
        anyhow::bail!("{PORTS} has no two numbers: {range:?}");
    };
    let ports = (last + 1).saturating_sub(first);
    ensure!(
        clients <= ports,
        "--clients {clients}: connections of this host have {ports} ports, {first} to {last}: use \
         --clients {ports} or fewer, or raise the sysctl net.ipv4.ip_local_port_range",
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_is_in_the_way_is_named_with_what_it_allows() {
        check_files(19_900, 20_000).expect("just enough");
        let text = check_files(20_000, 20_000)
            .expect_err("too few")
            .to_string();
        assert!(
            text.contains("needs 20100 open files") && text.contains("--clients 19900 or fewer"),
            "{text}"
        );
        let few = check_files(1, 10).expect_err("too few").to_string();
        assert!(few.contains("--clients 0 or fewer"), "{few}");
        check_ports(28_232, "32768\t60999\n").expect("just enough");
        let text = check_ports(28_233, "32768\t60999\n").expect_err("too few");
        assert!(text.to_string().contains("28232 ports"), "{text}");
        assert!(check_ports(1, "9 8").is_err());
        assert!(check_ports(1, "none").is_err());
    }
}
