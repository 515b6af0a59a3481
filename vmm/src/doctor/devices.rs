//! Optional devices: RDMA and taps.

use std::io;

use super::kernel::{by_apt, with_remedy};
use super::{Finding, Host};

/// Returns the devices that libibverbs finds, a line for each port, or the reason why it finds
/// none.
pub(super) fn verbs() -> Result<Vec<String>, String> {
    let ports = memory_fabric::rdma::summaries();
    ports
        .map(|ports| ports.iter().map(ToString::to_string).collect())
        .map_err(|error| error.to_string())
}

/// Checks for a usable RDMA device, or a network card on which a software one can be created.
pub(super) fn rdma(host: &Host, seen: &Result<Vec<String>, String>) -> Finding {
    const CHECK: &str = "rdma";
    const INSTALL: &str = "sudo apt install libibverbs1 ibverbs-providers";
    const KERNEL: &str = "sudo apt install linux-image-amd64 && sudo reboot";
    let install = by_apt(host, INSTALL);
    let devices = host.names_in("/sys/class/infiniband");
    if !devices.is_empty() {
        let names = devices.join(", ");
        return match seen {
            Ok(ports) if ports.is_empty() => with_remedy(
                Finding::warning(
                    CHECK,
                    format!("{names}, for which libibverbs has no provider; TCP is used"),
                ),
                install,
            ),
            Ok(ports) => Finding::ok(CHECK, ports.join("; ")),
            Err(error) => {
                let finding = Finding::warning(CHECK, format!("{names}: {error}"));
                with_remedy(finding, install)
            }
        };
    }
    let finding = Finding::warning(CHECK, "no device; TCP is used");
    if !host.has_module("rdma_rxe") {
        let detail = "no device, and no rdma_rxe in this kernel; TCP is used";
        return with_remedy(Finding::warning(CHECK, detail), by_apt(host, KERNEL));
    }
    let card = host
        .names_in("/sys/class/net")
        .into_iter()
        .find(|name| host.exists(&format!("/sys/class/net/{name}/device")))
        .unwrap_or_else(|| "eth0".into());
    finding.remedy(format!(
        "sudo modprobe rdma_rxe && sudo rdma link add rxe0 type rxe netdev {card}"
    ))
}

/// Checks that a tap for a guest's network card can be created.
pub(super) fn tap(host: &Host) -> Finding {
    const CHECK: &str = "tap";
    match host.opens("/dev/net/tun") {
        Ok(()) => Finding::ok(CHECK, "/dev/net/tun opens"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Finding::warning(CHECK, "no /dev/net/tun: no network card for a guest")
                .remedy("sudo modprobe tun")
        }
        Err(error) => Finding::warning(CHECK, format!("/dev/net/tun does not open: {error}"))
            .remedy("sudo chmod 666 /dev/net/tun"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::tests::FakeHost;
    use super::*;

    #[test]
    fn an_rdma_device_is_named() {
        let host = FakeHost::new()
            .file("/etc/os-release", "ID=debian\n")
            .file("/sys/class/infiniband/rxe0/node_type", "1: CA\n");
        let seen = Ok(vec!["rxe0 port 1 active 10.0.0.1".to_owned()]);
        let finding = rdma(&host.host(), &seen);
        assert_eq!(finding.status, Status::Ok);
        assert!(finding.detail.contains("rxe0 port 1 active 10.0.0.1"));
        for seen in [
            Ok(Vec::new()),
            Err("libibverbs.so.1 cannot be loaded".to_owned()),
        ] {
            let finding = rdma(&host.host(), &seen);
            assert_eq!(finding.status, Status::Warning, "{seen:?}");
            assert!(finding.detail.contains("rxe0"), "{seen:?}");
            assert!(
                finding
                    .remedy
                    .is_some_and(|r| r.contains("ibverbs-providers"))
            );
        }
    }

    #[test]
    fn a_soft_device_is_made_of_the_network_card_that_is_there() {
        let host = FakeHost::new()
            .file("/proc/sys/kernel/osrelease", "6.1.0\n")
            .file(
                "/lib/modules/6.1.0/modules.dep",
                "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko.xz: kernel/a.ko\n",
            )
            .file("/sys/class/net/lo/mtu", "65536\n")
            .file("/sys/class/net/enp1s0/device/vendor", "0x1af4\n");
        let finding = rdma(&host.host(), &Ok(Vec::new()));
        assert_eq!(finding.status, Status::Warning);
        let remedy = finding.remedy.expect("a remedy");
        assert!(remedy.ends_with("type rxe netdev enp1s0"), "{remedy}");
    }

    #[test]
    fn a_kernel_without_the_module_needs_another_kernel() {
        for (release, is_known) in [
            ("ID=debian\n", true),
            ("ID=ubuntu\nID_LIKE=debian\n", true),
            ("ID=\"rhel\"\nID_LIKE=\"fedora\"\n", false),
        ] {
            let host = FakeHost::new()
                .file("/etc/os-release", release)
                .file("/proc/sys/kernel/osrelease", "6.1.0-cloud\n")
                .file(
                    "/lib/modules/6.1.0-cloud/modules.dep",
                    "kernel/kvm.ko: kernel/rdma_rxe.ko\n",
                );
            let finding = rdma(&host.host(), &Ok(Vec::new()));
            assert_eq!(finding.status, Status::Warning);
            let by_apt = finding.remedy.is_some_and(|r| r.contains("apt install"));
            assert_eq!(by_apt, is_known, "{release}");
        }
    }

    #[test]
    fn a_tap_is_not_needed() {
        assert_eq!(
            tap(&FakeHost::new().file("/dev/net/tun", "").host()).status,
            Status::Ok
        );
        let finding = tap(&FakeHost::new().host());
        assert_eq!(finding.status, Status::Warning);
        assert_eq!(finding.remedy.as_deref(), Some("sudo modprobe tun"));
        let strange = tap(&FakeHost::new().file("/dev/net/tun/not-a-device", "").host());
        assert_eq!(strange.status, Status::Warning);
        assert!(strange.remedy.is_some_and(|r| r.contains("chmod")));
    }
}
