//! Tests of what [`RunSettings::parse`] accepts and refuses.

use std::time::Duration;

use memory_fabric::fabric::TransportKind;
use memory_fabric::rdma::DeviceChoice;

use super::address::Donor;
use super::choice::{Numa, Placement, Switch};
use super::cpu_list::CpuList;
use super::node_arg::NodeArg;
use super::*;
use crate::machine::Irqchip;

fn mib(mib: u64) -> ByteSize {
    ByteSize::from_mib(mib)
}

fn donors(list: &[&str]) -> Vec<Donor> {
    list.iter()
        .map(|text| text.parse().expect("a donor"))
        .collect()
}

/// A configuration that is valid: 1 GiB, of which 256 MiB stay here.
fn valid() -> RunSettings {
    RunSettings {
        // Any file with contents does: what is in it is not looked at here.
        kernel: Some(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml").into()),
        memory: mib(1024),
        local_memory: Some(mib(256)),
        donors: donors(&["127.0.0.1:7000"]),
        ..RunSettings::default()
    }
}

/// The one line with which a changed configuration is refused.
fn refused(change: impl FnOnce(&mut RunSettings)) -> String {
    let mut config = valid();
    change(&mut config);
    let error = config.parse().expect_err("to be refused");
    let message = error.to_string();
    assert_eq!(message.lines().count(), 1, "{message}");
    message
}

/// What is refused, and every text that the line must have: value, limit, remedy.
fn assert_refused(change: impl FnOnce(&mut RunSettings), texts: &[&str]) {
    let message = refused(change);
    for text in texts {
        assert!(message.contains(text), "no {text:?} in {message:?}");
    }
}

#[test]
fn a_complete_configuration_is_accepted() {
    let run = valid().parse().expect("is valid");
    assert_eq!(run.memory, mib(1024));
    assert_eq!(run.local_memory, mib(256));
    assert_eq!(run.donors[0].address.to_string(), "127.0.0.1:7000");
    assert_eq!(run.donor_grace, Duration::from_secs(30));
}

#[test]
fn memory_that_may_be_added_is_whole_blocks_within_what_a_guest_can_have() {
    for size in [0, 1, 3] {
        assert_refused(
            |run| run.hotplug_memory = Some(mib(size)),
            &["--hotplug-memory", "multiple of 2M"],
        );
    }
    let most = GUEST_MEMORY_MAX.saturating_sub(mib(1024));
    assert_refused(
        |run| run.hotplug_memory = Some(most.saturating_add(mib(2))),
        &["--hotplug-memory", &most.to_string()],
    );
    let mut config = valid();
    config.hotplug_memory = Some(most);
    let run = config.parse().expect("is valid");
    assert_eq!(run.hotplug_memory, Some(most));
    // It needs a place for its device.
    let nets = |count| vec!["tap=tap0".parse().expect("a tap"); count];
    config.nets = nets(5);
    assert!(config.parse().is_ok());
    assert_refused(
        |run| {
            run.hotplug_memory = Some(mib(2));
            run.nets = nets(6);
        },
        &["too many virtio devices", "3 other(s)"],
    );
}

#[test]
fn local_memory_beyond_the_guests_is_for_what_is_added() {
    let mut config = valid();
    config.donors.clear();
    config.local_memory = Some(mib(1536));
    config.hotplug_memory = Some(mib(512));
    let run = config.parse().expect("is valid");
    assert_eq!(run.local_memory, mib(1536));
    assert_refused(
        |run| {
            run.local_memory = Some(mib(1537));
            run.hotplug_memory = Some(mib(512));
        },
        &[
            "--local-memory 1537 MiB",
            "--memory 1 GiB",
            "--hotplug-memory 512 MiB",
            "1.5 GiB together",
        ],
    );
}

#[test]
fn without_donors_all_memory_stays_here() {
    let mut config = valid();
    config.local_memory = None;
    config.donors.clear();
    let run = config.parse().expect("is valid");
    assert_eq!(run.local_memory, run.memory);
}

#[test]
fn what_donors_are_asked_for_does_not_stay_here() {
    let mut config = valid();
    config.local_memory = None;
    config.donors = donors(&["127.0.0.1:7000,memory=512M", "127.0.0.1:7001,memory=256M"]);
    assert_eq!(config.parse().expect("is valid").local_memory, mib(256));
    config.donors = donors(&["127.0.0.1:7000,memory=8G"]);
    let run = config.parse().expect("is valid");
    assert_eq!(run.local_memory, LOCAL_MEMORY_MIN);
}

#[test]
fn the_loopback_transport_needs_no_donor() {
    let mut config = valid();
    config.donors.clear();
    config.transport = TransportKind::Loopback;
    assert_eq!(config.parse().expect("is valid").local_memory, mib(256));
    assert_refused(
        |c| c.transport = TransportKind::Loopback,
        &["--donor", "remove"],
    );
}

#[test]
fn a_kernel_must_be_given_and_readable() {
    assert_refused(|c| c.kernel = None, &["no kernel given", "--kernel FILE"]);
    assert_refused(
        |c| c.kernel = Some("/no/such".into()),
        &["--kernel /no/such"],
    );
    assert_refused(
        |c| c.kernel = Some("/".into()),
        &["--kernel / is a directory"],
    );
    assert_refused(
        |c| c.initrd = Some("/no/such".into()),
        &["--initrd /no/such"],
    );
    let empty = tempfile::NamedTempFile::new().expect("a temporary file");
    assert_refused(|c| c.initrd = Some(empty.path().into()), &["is empty"]);
}

#[test]
fn numbers_outside_their_range_are_refused() {
    assert_refused(|c| c.cpus = 0, &["--cpus 0", "1 to 254"]);
    assert_refused(|c| c.cpus = 255, &["--cpus 255", "1 to 254"]);
    assert_refused(
        |c| c.donor_grace_seconds = 3601,
        &["--donor-grace 3601", "0 to 3600"],
    );
}

#[test]
fn each_vcpu_has_one_cpu_that_this_process_may_use() {
    let pin = |cpus, list: &str| {
        let list = list.parse().expect("a list");
        move |c: &mut RunSettings| {
            c.cpus = cpus;
            c.cpu_pinning = Some(list);
        }
    };
    assert_refused(
        pin(2, "0"),
        &["names 1 CPU(s)", "the 2 vCPU(s)", "one for each"],
    );
    assert_refused(pin(1, "0-1"), &["names 2 CPU(s)", "the 1 vCPU(s)"]);
    let allowed = CpuList(crate::machine::allowed_cpus().expect("a set"));
    let remedy = format!("name CPUs of {allowed},");
    assert_refused(pin(1, "8191"), &["names CPU 8191", "not allowed", &remedy]);
    let first = allowed.0[0];
    let mut config = valid();
    pin(2, &format!("{first},{first}"))(&mut config);
    assert!(config.parse().is_ok());
}

#[test]
fn dedicated_cpus_are_one_for_each_vcpu_and_need_the_controllers_of_kvm() {
    let allowed = crate::machine::allowed_cpus().expect("a set");
    let first = allowed[0];
    let dedicate = |cpus, list: Option<&str>| {
        let list = list.map(|list| list.parse().expect("a list"));
        move |c: &mut RunSettings| {
            c.cpus = cpus;
            c.cpu_pinning = list;
            c.dedicated_cpus = true;
        }
    };
    assert_refused(
        dedicate(3, None),
        &["--dedicated-cpus", "each of the 3 vCPU(s)", "--cpu-pinning"],
    );
    let same = format!("{first},{first}");
    assert_refused(
        dedicate(2, Some(&same)),
        &[
            "--dedicated-cpus",
            &format!("CPU {first} for 2 vCPUs"),
            "2 distinct CPUs",
        ],
    );
    let one = first.to_string();
    assert_refused(
        |c| {
            dedicate(1, Some(&one))(c);
            c.irqchip = Some(Irqchip::User);
        },
        &["--dedicated-cpus", "--irqchip user", "omit one"],
    );
    let mut config = valid();
    dedicate(1, Some(&one))(&mut config);
    assert!(config.parse().expect("valid").dedicated_cpus);
}

#[test]
fn memory_has_a_least_a_most_and_whole_pages() {
    assert_refused(
        |c| c.memory = mib(32),
        &["--memory 32 MiB", "64 MiB is the least"],
    );
    assert_refused(
        |c| c.memory = mib(9 << 20),
        &["--memory 9 TiB", "8 TiB is the most"],
    );
    assert_refused(
        |c| c.memory = ByteSize::from_bytes((1 << 30) + 1),
        &["1073741825 B", "4096 bytes", "1 GiB is the next lower"],
    );
}

#[test]
fn local_memory_has_a_least_and_a_most() {
    assert_refused(
        |c| c.local_memory = Some(mib(8)),
        &["8 MiB", "16 MiB is the least"],
    );
    let too_much = |c: &mut RunSettings| c.local_memory = Some(mib(2048));
    assert_refused(too_much, &["--local-memory 2 GiB", "--memory 1 GiB"]);
    assert!(!refused(too_much).contains("--hotplug-memory"));
}

#[test]
fn memory_without_a_home_is_refused() {
    assert_refused(
        |c| c.donors.clear(),
        &["--local-memory 256 MiB", "768 MiB", "add --donor"],
    );
    assert_refused(
        |c| c.donors = donors(&["127.0.0.1:7000,memory=512M"]),
        &["1 GiB", "256 MiB", "512 MiB"],
    );
    assert_refused(|c| c.local_memory = None, &["add --local-memory SIZE"]);
}

#[test]
fn a_donor_named_twice_is_refused_by_its_address() {
    assert_refused(
        |c| c.donors = donors(&["127.0.0.1:7000", "localhost:7000"]),
        &["localhost:7000", "same as 127.0.0.1:7000"],
    );
}

#[test]
fn a_donor_must_be_reachable_in_principle() {
    assert_refused(|c| c.donors = donors(&["127.0.0.1:0"]), &["port 0"]);
    assert_refused(
        |c| c.donors = donors(&["127.0.0.1:7000,memory=1"]),
        &["memory= 1 B", "4 KiB is the least"],
    );
    assert_refused(
        |c| c.donors = donors(&["no-such-host.invalid:7000"]),
        &["cannot resolve donor no-such-host.invalid:7000"],
    );
    let many: Vec<_> = (1..=65).map(|port| format!("127.0.0.1:{port}")).collect();
    assert_refused(
        |c| c.donors = many.iter().map(|t| t.parse().expect("a donor")).collect(),
        &["65 given", "64 is the limit"],
    );
}

#[test]
fn a_donor_beyond_this_host_needs_insecure() {
    let remote = |c: &mut RunSettings| c.donors = donors(&["192.0.2.1:7000"]);
    assert_refused(
        remote,
        &["192.0.2.1:7000", "without authentication", "add --insecure"],
    );
    let mut config = valid();
    remote(&mut config);
    config.insecure = true;
    assert!(config.parse().is_ok());
}

#[test]
fn a_vm_without_certificates_warns_of_donors_and_nodes_on_other_hosts() {
    let warning = |change: &dyn Fn(&mut RunSettings)| {
        let mut settings = valid();
        settings.insecure = true;
        change(&mut settings);
        settings.parse().expect("valid").unprotected()
    };
    assert_eq!(warning(&|_| ()), None);
    let here = donors(&["127.0.0.1:7000", "127.0.0.1:7001"]);
    assert_eq!(warning(&|c| c.donors = here.clone()), None);
    let there = donors(&["127.0.0.1:7000", "192.0.2.1:7000", "192.0.2.2:7000"]);
    let warned = warning(&|c| c.donors = there.clone()).expect("a warning");
    for part in ["donor 192.0.2.1:7000 and 1 more ", "--credentials DIR"] {
        assert!(warned.contains(part), "{warned}");
    }
    // The namespaces of `up`, which no other host reaches.
    let inside = |c: &mut RunSettings| (c.donors, c.stays_on_this_host) = (there.clone(), true);
    assert_eq!(warning(&inside), None);
    let node = |address: &str| {
        let node = format!("{address},cpus=1").parse().expect("a node");
        warning(&|c| (c.cpus, c.nodes) = (2, vec![NodeArg::clone(&node)]))
    };
    assert_eq!(node("127.0.0.1:7000"), None);
    let warned = node("192.0.2.3:7000").expect("a warning");
    assert!(warned.contains("to node 192.0.2.3:7000 are"), "{warned}");
}

#[test]
fn a_checksum_of_ours_is_refused_where_pages_are_read_by_rdma() {
    assert_refused(
        |c| (c.transport, c.checksum) = (TransportKind::Rdma, true),
        &["remove --checksum", "use --transport tcp"],
    );
}

#[test]
fn a_command_is_not_run_again_and_again() {
    assert_refused(
        |config| {
            config.exec = Some("true".to_owned());
            config.on_reboot = OnReboot::Restart;
        },
        &["--exec", "--on-reboot restart", "remove one"],
    );
}

#[test]
fn settings_of_connections_that_are_not_made_are_refused() {
    let mut settings = RunSettings {
        rdma: Some("mtu=1024".parse().expect("settings")),
        ..RunSettings::default()
    };
    let mtu = |settings: &RunSettings| {
        let rdma = settings.checked_rdma()?;
        Ok::<_, ValidationError>(rdma.mtu.map(|mtu| mtu.bytes()))
    };
    assert_eq!(mtu(&settings).expect("auto uses RDMA"), Some(1024));
    settings.transport = TransportKind::Tcp;
    let text = mtu(&settings).expect_err("no RDMA").to_string();
    assert_eq!(
        text,
        "--rdma has no effect with --transport tcp; remove one of them"
    );
    settings.rdma = None;
    assert_eq!(mtu(&settings).expect("nothing is set"), None);
}

#[test]
fn a_vm_that_changes_its_user_does_without_rdma() {
    let mut settings = RunSettings {
        user: Some("65534:65534".to_owned()),
        ..RunSettings::default()
    };
    let device = settings.checked_rdma().expect("nothing is set").device;
    assert_eq!(device, DeviceChoice::None);
    settings.rdma = Some("mtu=1024".parse().expect("settings"));
    let text = settings.checked_rdma().expect_err("no RDMA").to_string();
    assert_eq!(
        text,
        "--rdma has no effect with --transport auto and --user; remove one of them"
    );
}

#[test]
fn a_zone_is_for_two_copies() {
    let zoned = |settings: &mut RunSettings, replicas| {
        settings.donors = donors(&["127.0.0.1:7000,zone=rack-1", "127.0.0.1:7001"]);
        settings.replicas = replicas;
    };
    let texts = ["127.0.0.1:7000", "zone=rack-1", "--replicas 2"];
    assert_refused(|settings| zoned(settings, 1), &texts);
    let mut settings = valid();
    zoned(&mut settings, 2);
    settings.parse().expect("two copies have zones");
}

#[test]
fn failing_donors_are_drained_where_there_are_some_that_can_be() {
    let mut on = valid();
    on.drain_failing = Switch::On;
    assert!(on.parse().expect("it has donors").drain_failing);
    let change = |settings: &mut RunSettings| settings.drain_failing = Switch::On;
    let without = |settings: &mut RunSettings| {
        change(settings);
        settings.donors.clear();
        settings.local_memory = None;
    };
    assert_refused(without, &["--drain-failing on", "add --donor"]);
    let exposed = |settings: &mut RunSettings| {
        change(settings);
        settings.numa = Numa::Expose;
    };
    assert_refused(exposed, &["--drain-failing on", "remove --numa expose"]);
}

#[test]
fn memory_with_one_copy_moves_by_its_heat() {
    let mut heat = valid();
    heat.placement = Placement::Heat;
    let parsed = heat.parse().expect("it has donors");
    assert_eq!(parsed.placement, Placement::Heat);
    let two = |settings: &mut RunSettings| {
        settings.placement = Placement::Heat;
        settings.donors = donors(&["127.0.0.1:7000", "127.0.0.1:7001"]);
        settings.replicas = 2;
    };
    assert_refused(two, &["--placement heat", "remove --replicas 2"]);
    let exposed = |settings: &mut RunSettings| {
        settings.placement = Placement::Heat;
        settings.numa = Numa::Expose;
    };
    assert_refused(exposed, &["--placement heat", "remove --numa expose"]);
}
