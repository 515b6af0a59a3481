//! vCPUs of a node with certificates: who gets some, and when they end.

use super::cluster::{Cluster, name};
use super::control_as;
use super::refusals::{answered, config, config_of, invalid};
use fabric_identity::Role;
use fabric_test_support::*;
use fabric_transport::control::{ControlError, ControlStream};
use fabric_transport::rdma::DeviceChoice;
use fabric_transport::stream::Carrier;
use fabric_wire::{
    ClockRate, ComputeEnd, ComputePorts, ComputeRequest, Frame, FrameKind, NodeClock, Refusal,
    VmSecret, encode_message,
};
use memory_fabric::compute::{CpuLender, Ending};
use memory_fabric::donor::policy::{Amounts, Rule};
use memory_fabric::donor::server::{Donor, DonorConfig, RdmaUse};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use time::OffsetDateTime;

/// Counts the processes that it would start; each lasts until it has to end.
#[derive(Debug, Default)]
struct Lender {
    started: AtomicUsize,
    readings: AtomicUsize,
}

impl CpuLender for Lender {
    fn serve(
        &self,
        control: &mut ControlStream,
        _request: &ComputeRequest,
        ending: &Ending,
    ) -> Result<(), ControlError> {
        self.started.fetch_add(1, Ordering::SeqCst);
        control.send(FrameKind::ComputePorts, &PORTS)?;
        fabric_host::poll::sleep_on(
            std::os::fd::AsRawFd::as_raw_fd(&ending.fd()),
            libc::POLLIN,
            Some(std::time::Instant::now() + PATIENCE),
        )
        .expect("it is woken");
        let reason = ending.reason().expect("it ends").to_owned();
        control.send(FrameKind::ComputeEnd, &ComputeEnd { reason })
    }

    fn clock(&self) -> NodeClock {
        let readings = self.readings.fetch_add(1, Ordering::SeqCst);
        NodeClock {
            ticks: readings as u64,
            ..CLOCK
        }
    }
}

const CLOCK: NodeClock = NodeClock {
    ticks: 0,
    rate: Some(ClockRate {
        khz: 2_000_000,
        scales: true,
    }),
    cpus: 4,
    free: 3,
};

const PORTS: ComputePorts = ComputePorts {
    memory: 1,
    vcpus: 2,
    certificate: None,
};

const LENT: u64 = 2 * MIB;

fn request(cpus: u8) -> ComputeRequest {
    ComputeRequest {
        name: "web".to_owned(),
        vm: [1; 16],
        secret: VmSecret([2; 32]),
        me: 1,
        nodes: 2,
        cpus,
        memory_bytes: 4 * MIB,
        hotplug_bytes: 0,
        lent_bytes: LENT,
        merge_tables: false,
        in_order: false,
        rdma: false,
    }
}

/// Starts the node `node/alpha`, which lends vCPUs too.
fn node(cluster: &Cluster, allow: Option<Vec<Rule>>) -> (Donor, Arc<Lender>) {
    let lender = Arc::new(Lender::default());
    let config = DonorConfig {
        listen: ([127, 0, 0, 1], 0).into(),
        memory_bytes: 16 * MIB,
        lease_duration_max: Duration::from_secs(30),
        spin: Duration::from_micros(20),
        rdma: DeviceChoice::None,
        credentials: Some(cluster.member("node/alpha", Role::Node)),
        allow,
    };
    let lends = Arc::clone(&lender) as Arc<dyn CpuLender>;
    let donor = Donor::lending_cpus(&config, RdmaUse::default(), Some(lends));
    (donor.expect("a donor on loopback"), lender)
}

fn ask(control: &mut ControlStream, cpus: u8) -> Result<ComputePorts, ControlError> {
    control.call(FrameKind::Compute, &request(cpus), FrameKind::ComputePorts)
}

/// Returns the reason of a refusal.
fn refused(control: &mut ControlStream, cpus: u8, refusal: Refusal) -> String {
    match ask(control, cpus).expect_err("refused") {
        ControlError::Refused {
            refusal: found,
            text,
            ..
        } => {
            assert_eq!(found, refusal, "{text}");
            text
        }
        other => panic!("{other}"),
    }
}

/// Returns why the vCPUs ended.
fn reason(control: &mut ControlStream) -> String {
    let (frame, payload) = control.receive(PATIENCE).expect("the end");
    assert_eq!(frame.kind, FrameKind::ComputeEnd);
    let end: ComputeEnd = control.decode(frame.kind, &payload).expect("a reason");
    end.reason
}

#[test]
fn who_has_no_valid_certificate_starts_no_process() {
    let (prod, other) = (Cluster::new("prod"), Cluster::new("prod"));
    prod.directory_of("node/alpha");
    prod.directory_of("vm/gone");
    prod.revoke("vm/gone", "node/alpha");
    let (donor, lender) = node(&prod, None);
    let payload = encode_message(&request(1));
    let header = Frame::new(FrameKind::Compute, 0, 0, true).encode(&payload);
    let frame = [header.as_slice(), &payload].concat();
    let invalid = invalid(&prod, &other).into_iter();
    let invalid = invalid.map(|(what, shown)| (what, config(shown)));
    let revoked = ("a revoked one", config_of(&prod, "vm/gone"));
    for (what, config) in invalid.chain([revoked]) {
        let answer = answered(donor.address(), config, &frame);
        println!("{what}: {}", answer.expect_err("the node answers"));
        assert_eq!(lender.started.load(Ordering::SeqCst), 0, "{what}");
    }
    let mut plain = ControlStream::connect(donor.address()).expect("connected");
    let error = ask(&mut plain, 1).expect_err("refused").to_string();
    assert!(error.contains("--credentials DIR"), "{error}");
    assert_eq!(lender.started.load(Ordering::SeqCst), 0);
    // The same request with a certificate like that of a VM starts one.
    answered(donor.address(), config(Some(prod.odd(|_| {}))), &frame).expect("an answer");
    assert_eq!(lender.started.load(Ordering::SeqCst), 1);
}

#[test]
fn a_node_or_operator_starts_no_process_and_neither_does_one_by_udp() {
    let prod = Cluster::new("prod");
    let (donor, lender) = node(&prod, None);
    let text = refused(
        &mut control_as(&prod, &donor, "node/beta"),
        1,
        Refusal::NotAllowed,
    );
    assert!(text.contains("ssi-hv/node/beta is no VM"), "{text}");
    let mut operator = ControlStream::connect_by(
        donor.address(),
        &Carrier::Tls(fabric_identity::ExpectedNode {
            credentials: prod.member("operator/eve", Role::Operator),
            name: name("alpha"),
        }),
    )
    .expect("connected");
    let text = refused(&mut operator, 1, Refusal::Malformed);
    assert!(text.contains("is no VM or node"), "{text}");
    let carrier = Carrier::Quic(prod.expected("vm/web", "alpha"));
    let mut by_udp = ControlStream::connect_by(donor.address(), &carrier).expect("connected");
    let text = refused(&mut by_udp, 1, Refusal::Malformed);
    assert!(text.contains("vCPUs are lent by TCP"), "{text}");
    assert_eq!(lender.started.load(Ordering::SeqCst), 0);
    assert_eq!(donor.pool().lent_bytes(), 0);
}

#[test]
fn a_member_gets_as_many_vcpus_and_as_much_memory_as_its_rule_allows() {
    let prod = Cluster::new("prod");
    let rule = |members: &str, cpus, bytes| Rule {
        members: members.parse().expect("a pattern"),
        gids: Vec::new(),
        limits: Amounts {
            cpus: Some(cpus),
            bytes: Some(bytes),
            ..Amounts::default()
        },
    };
    let rules = vec![
        rule("vm/web", 3, 8 * MIB),
        rule("vm/db", 0, 8 * MIB),
        rule("vm/small", 1, LENT - 4096),
    ];
    let (donor, lender) = node(&prod, Some(rules));
    let refused = |holder: &str, cpus| {
        let mut control = control_as(&prod, &donor, holder);
        refused(&mut control, cpus, Refusal::NotAllowed)
    };
    let text = refused("vm/stranger", 1);
    assert!(text.contains("add --allow vm/stranger"), "{text}");
    let text = refused("vm/db", 1);
    assert!(
        text.contains("asks for 1 vCPU(s) and has 0, 0 is its limit"),
        "{text}"
    );
    assert!(text.contains("raise cpus="), "{text}");
    let text = refused("vm/small", 1);
    assert!(text.contains("asks for 2097152 bytes"), "{text}");
    assert_eq!(lender.started.load(Ordering::SeqCst), 0);
    let mut web = control_as(&prod, &donor, "vm/web");
    assert_eq!(ask(&mut web, 2).expect("allowed"), PORTS);
    let text = refused("vm/web", 2);
    assert!(
        text.contains("asks for 2 vCPU(s) and has 2, 3 is its limit"),
        "{text}"
    );
    let accounts = donor.pool().accounts().expect("a policy");
    let used = accounts.used()[&"vm/web".parse().expect("a member")];
    assert_eq!((used.cpus, used.bytes), (2, LENT));
    assert_eq!(lender.started.load(Ordering::SeqCst), 1);
}

#[test]
fn vcpus_of_a_member_that_is_evicted_or_revoked_end_with_the_reason() {
    let prod = Cluster::new("prod");
    let (donor, _) = node(&prod, None);
    let start = |holder: &str| {
        let mut control = control_as(&prod, &donor, holder);
        ask(&mut control, 1).expect("vCPUs");
        control
    };
    let (mut web, mut db) = (start("vm/web"), start("vm/db"));
    donor.evict(&"vm/web".parse().expect("a member"));
    let text = reason(&mut web);
    assert!(text.contains("vm/web was evicted"), "{text}");
    // Reading the same files again ends nothing; a longer list of revoked certificates does.
    let closed = || {
        let reloaded = donor.reload(None).expect("the files are right");
        reloaded.map(|reloaded| reloaded.connections)
    };
    assert_eq!(closed(), Some(0));
    prod.revoke("vm/db", "node/alpha");
    assert_eq!(closed(), Some(1));
    let text = reason(&mut db);
    assert!(
        text.contains("does not accept the VM's certificate any more"),
        "{text}"
    );
    assert!(
        text.contains("revoked") || text.contains("Revoked"),
        "{text}"
    );
}

#[test]
fn vcpus_of_a_member_whose_certificate_expires_end_with_the_reason() {
    let prod = Cluster::new("prod");
    let (donor, _) = node(&prod, None);
    let mut neighbour = control_as(&prod, &donor, "vm/db");
    ask(&mut neighbour, 1).expect("vCPUs");
    let until = OffsetDateTime::now_utc() + time::Duration::seconds(8);
    let short = prod.odd(|parameters| parameters.not_after = until);
    let directory = prod.directory_of("vm/web");
    std::fs::write(directory.join("cert.pem"), &short.pem).expect("written");
    std::fs::write(directory.join("key.pem"), short.key.serialize_pem()).expect("written");
    let mut web = control_as(&prod, &donor, "vm/web");
    ask(&mut web, 1).expect("it is valid yet");
    let text = reason(&mut web);
    assert!(text.contains("the VM's certificate has expired"), "{text}");
    assert!(OffsetDateTime::now_utc() > until, "it ended too early");
    // The neighbour's go on.
    donor.evict(&"vm/db".parse().expect("a member"));
    let text = reason(&mut neighbour);
    assert!(text.contains("vm/db was evicted"), "{text}");
}

fn read_clock(control: &mut ControlStream) -> Result<NodeClock, ControlError> {
    control.call(FrameKind::ReadClock, &(), FrameKind::Clock)
}

#[test]
fn a_member_reads_the_clock_of_a_node_a_limited_number_of_times() {
    let prod = Cluster::new("prod");
    let (donor, lender) = node(&prod, None);
    let mut web = control_as(&prod, &donor, "vm/web");
    for number in 0..256 {
        let clock = read_clock(&mut web).expect("an answer");
        let ticks = number;
        assert_eq!(clock, NodeClock { ticks, ..CLOCK });
    }
    let text = read_clock(&mut web).expect_err("too often").to_string();
    assert!(text.contains("256 times, which is the limit"), "{text}");
    assert_eq!(lender.started.load(Ordering::SeqCst), 0);
    // Nothing else is asked on such a connection.
    let mut web = control_as(&prod, &donor, "vm/web");
    read_clock(&mut web).expect("an answer");
    let text = ask(&mut web, 1).expect_err("not a clock").to_string();
    assert!(text.contains("Compute"), "{text}");
    assert_eq!(lender.started.load(Ordering::SeqCst), 0);
}

#[test]
fn who_has_no_certificate_and_who_asks_a_donor_reads_no_clock() {
    let prod = Cluster::new("prod");
    let (donor, lender) = node(&prod, None);
    let mut plain = ControlStream::connect(donor.address()).expect("connected");
    let text = read_clock(&mut plain).expect_err("refused").to_string();
    assert!(text.contains("--credentials DIR"), "{text}");
    assert_eq!(lender.readings.load(Ordering::SeqCst), 0);
    let memory_only = Donor::start(&DonorConfig {
        listen: ([127, 0, 0, 1], 0).into(),
        memory_bytes: 16 * MIB,
        lease_duration_max: Duration::from_secs(30),
        spin: Duration::from_micros(20),
        rdma: DeviceChoice::None,
        credentials: None,
        allow: None,
    });
    let memory_only = memory_only.expect("a donor on loopback");
    let mut plain = ControlStream::connect(memory_only.address()).expect("connected");
    let text = read_clock(&mut plain).expect_err("refused").to_string();
    assert!(text.contains("lends memory only"), "{text}");
}
