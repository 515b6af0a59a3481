//! Processes that use leases which members have delegated to their certificates.

use super::cluster::{Cluster, name};
use super::{ask, control_as, ends, lease_as};
use fabric_identity::pinned::PinnedIdentity;
use fabric_identity::{ExpectedNode, Fingerprint, Role, SharedCredentials};
use fabric_test_support::*;
use fabric_transport::control::{ControlError, ControlStream};
use fabric_transport::stream::Carrier;
use fabric_wire::{DelegateRequest, FrameKind, LeaseStatus, Refusal, Token, TrafficClass};
use memory_fabric::donor::policy::{Amounts, Rule};
use memory_fabric::donor::server::Donor;
use memory_fabric::link::{Delegated, Leased, LinkConfig};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// A process of a VM on a node, with a certificate that it has made itself.
struct Process {
    identity: PinnedIdentity,
    carriers: [Carrier; 2],
}

impl Process {
    /// One that knows this cluster.
    fn of(cluster: &Cluster) -> Self {
        let subject = "spiffe://vm-0011/ssi-hv/node/1".parse();
        let identity = PinnedIdentity::generate(&subject.expect("an identity")).expect("a key");
        let known = cluster.member("vm/web", Role::Vm).current();
        let authorities = known.authorities().to_vec();
        let shown = SharedCredentials::of_process(&identity, name("prod"), authorities);
        let credentials = shown.expect("credentials");
        let node = ExpectedNode {
            credentials,
            name: name("alpha"),
        };
        Self {
            identity,
            carriers: [Carrier::Tls(node.clone()), Carrier::Quic(node)],
        }
    }

    fn certificate(&self) -> Fingerprint {
        self.identity.fingerprint()
    }

    fn connect_by(&self, donor: &Donor, carrier: &Carrier) -> Result<ControlStream, ControlError> {
        ControlStream::connect_by(donor.address(), carrier)
    }

    fn connect(&self, donor: &Donor) -> ControlStream {
        self.connect_by(donor, &self.carriers[0]).expect("a donor")
    }

    fn resume(&self, donor: &Donor, token: Token) -> Result<ControlStream, ControlError> {
        let mut control = self.connect_by(donor, &self.carriers[0])?;
        resume(&mut control, token).map(|_| control)
    }

    fn attach(&self, donor: &Donor, token: Token) -> Result<ControlStream, ControlError> {
        let mut control = self.connect_by(donor, &self.carriers[0])?;
        control.attach(token, TrafficClass::Urgent, &ends())?;
        Ok(control)
    }

    /// Waits until the donor does not know this process.
    fn await_stranger(&self, donor: &Donor, token: Token) {
        wait_until("the process is known", || {
            let error = self.resume(donor, token).expect_err("refused");
            assert!(!matches!(error, ControlError::Connect(..)), "{error}");
            is_refused_by_tls(&error)
        });
    }
}

fn is_refused_by_tls(error: &ControlError) -> bool {
    super::refusals::describe(error).contains("refuses this end's certificate")
}

fn resume(control: &mut ControlStream, token: Token) -> Result<LeaseStatus, ControlError> {
    control.call(FrameKind::Resume, &token, FrameKind::Status)
}

fn delegate(
    control: &mut ControlStream,
    token: Token,
    to: Fingerprint,
) -> Result<LeaseStatus, ControlError> {
    let request = DelegateRequest {
        token,
        certificate: to.bytes(),
    };
    control.call(FrameKind::Delegate, &request, FrameKind::Status)
}

fn delegate_as(cluster: &Cluster, donor: &Donor, holder: &str, token: Token, to: &Process) {
    let mut control = control_as(cluster, donor, holder);
    delegate(&mut control, token, to.certificate()).expect("its lease");
}

fn refusal(result: Result<impl Sized, ControlError>) -> (Refusal, String) {
    match result.err() {
        Some(ControlError::Refused { refusal, text, .. }) => (refusal, text),
        Some(other) => panic!("{}", super::refusals::describe(&other)),
        None => panic!("it is not refused"),
    }
}

/// Returns how many certificates of processes a donor accepts.
fn known(donor: &Donor) -> usize {
    donor.credentials().expect("given").delegates().count()
}

/// Waits until a connection is closed by the other end.
fn ends_soon(control: &mut ControlStream) {
    let received = control.receive(PATIENCE);
    let error = received.expect_err("nothing is sent");
    assert!(matches!(error, ControlError::Stream(..)), "{error}");
}

#[test]
fn a_process_uses_the_lease_that_is_delegated_to_it_and_no_other() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    let (_one, lease) = lease_as(&prod, &donor, "vm/web");
    let (_other, other) = lease_as(&prod, &donor, "vm/web");
    let (_foreign, foreign) = lease_as(&prod, &donor, "vm/db");
    let [process, stranger] = [Process::of(&prod), Process::of(&prod)];
    for carrier in &process.carriers {
        let connected = process.connect_by(&donor, carrier);
        let refused = connected.and_then(|mut control| resume(&mut control, lease.token));
        let error = refused.expect_err("nothing is delegated to it");
        assert!(is_refused_by_tls(&error), "{carrier:?}: {error}");
    }
    delegate_as(&prod, &donor, "vm/web", lease.token, &process);
    for carrier in &process.carriers {
        let connect = || process.connect_by(&donor, carrier).expect("it is accepted");
        resume(&mut connect(), lease.token).expect("its lease");
        let mut pages = connect();
        let urgent = TrafficClass::Urgent;
        pages
            .attach(lease.token, urgent, &ends())
            .expect("its pages");
        // No other lease, of the same member or another one.
        for token in [other.token, foreign.token, Token([7; 16])] {
            let (unknown, _) = refusal(resume(&mut connect(), token));
            assert_eq!(unknown, Refusal::UnknownLease);
            let (unknown, _) = refusal(connect().attach(token, urgent, &ends()));
            assert_eq!(unknown, Refusal::UnknownLease);
        }
        // And nothing but that.
        let (denied, text) = refusal(ask(&mut connect(), MIB));
        assert_eq!(denied, Refusal::NotAllowed);
        assert!(text.contains("Lease is for members"), "{text}");
        let to = stranger.certificate();
        let (denied, _) = refusal(delegate(&mut connect(), lease.token, to));
        assert_eq!(denied, Refusal::NotAllowed);
        for kind in [FrameKind::Compute, FrameKind::ReadClock, FrameKind::Connect] {
            let mut control = connect();
            let asked = control.call::<(), LeaseStatus>(kind, &(), FrameKind::Status);
            assert_eq!(refusal(asked).0, Refusal::NotAllowed, "{kind:?}");
        }
    }
    let mut control = process.resume(&donor, lease.token).expect("its lease");
    let (wrong, _) = refusal(delegate(&mut control, lease.token, stranger.certificate()));
    assert_eq!(wrong, Refusal::Malformed);
    let error = stranger.resume(&donor, lease.token).expect_err("unknown");
    assert!(is_refused_by_tls(&error), "{error}");
    // Who has no lease delegates none, and gives nobody more by it.
    let mut db = control_as(&prod, &donor, "vm/db");
    let (unknown, _) = refusal(delegate(&mut db, lease.token, stranger.certificate()));
    assert_eq!((unknown, known(&donor)), (Refusal::UnknownLease, 1));
    delegate_as(&prod, &donor, "vm/db", foreign.token, &stranger);
    let (unknown, _) = refusal(stranger.resume(&donor, lease.token));
    assert_eq!(unknown, Refusal::UnknownLease);
    // Also where both have delegated to it.
    delegate_as(&prod, &donor, "vm/db", foreign.token, &process);
    assert_eq!(known(&donor), 1);
    process.resume(&donor, lease.token).expect("its lease");
    process.resume(&donor, foreign.token).expect("its lease");
    donor.evict(&"vm/db".parse().expect("a holder"));
    process.resume(&donor, lease.token).expect("its lease");
    let (unknown, _) = refusal(process.resume(&donor, foreign.token));
    assert_eq!(unknown, Refusal::UnknownLease);
    // It knows the donor by its name, with whichever certificate.
    prod.renew_revoked("node/alpha");
    donor.reload(None).expect("a new certificate");
    process.resume(&donor, lease.token).expect("its lease");
}

#[test]
fn a_process_believes_no_other_node() {
    let (prod, other) = (Cluster::new("prod"), Cluster::new("prod"));
    let donor = prod.donor(MIB);
    let misled = Process::of(&other);
    let error = misled.resume(&donor, Token([7; 16])).expect_err("unknown");
    assert!(matches!(error, ControlError::Identity(..)), "{error}");
    let process = Process::of(&prod);
    let [Carrier::Tls(mut node), _] = process.carriers.clone() else {
        panic!("TLS is first");
    };
    node.name = name("beta");
    let error = ControlStream::connect_by(donor.address(), &Carrier::Tls(node));
    let error = super::refusals::describe(&error.expect_err("another node"));
    assert!(error.contains("node/beta is needed here"), "{error}");
    let none = SharedCredentials::of_process(&process.identity, name("prod"), Vec::new());
    let none = none.expect_err("no authority").to_string();
    assert!(none.contains("it names no authority"), "{none}");
}

#[test]
fn a_delegation_ends_with_its_lease() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    let process = Process::of(&prod);
    for by_process in [false, true] {
        let (mut owner, lease) = lease_as(&prod, &donor, "vm/web");
        delegate_as(&prod, &donor, "vm/web", lease.token, &process);
        let mut control = process.resume(&donor, lease.token).expect("its lease");
        let mut pages = process.attach(&donor, lease.token).expect("its pages");
        let releasing = if by_process { &mut control } else { &mut owner };
        let _: LeaseStatus = releasing
            .call(FrameKind::Release, &lease.token, FrameKind::Status)
            .expect("released");
        ends_soon(&mut pages);
        assert_eq!((known(&donor), donor.pool().leases()), (0, 0));
        process.await_stranger(&donor, lease.token);
    }
    // One that is not renewed ends too.
    let mut owner = control_as(&prod, &donor, "vm/web");
    let mut request = super::lease_request(MIB);
    request.duration_ms = 1000;
    let lease: fabric_wire::LeaseGrant = owner
        .call(FrameKind::Lease, &request, FrameKind::Granted)
        .expect("granted");
    delegate_as(&prod, &donor, "vm/web", lease.token, &process);
    let mut pages = process.attach(&donor, lease.token).expect("its pages");
    ends_soon(&mut pages);
    assert_eq!(known(&donor), 0);
    let mut again = control_as(&prod, &donor, "vm/web");
    let ended = delegate(&mut again, lease.token, process.certificate());
    assert_eq!(refusal(ended).0, Refusal::UnknownLease);
    assert_eq!(known(&donor), 0);
}

#[test]
fn a_lease_that_is_delegated_anew_ends_the_connections_of_the_former_process() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    let (_owner, lease) = lease_as(&prod, &donor, "vm/web");
    let [former, next] = [Process::of(&prod), Process::of(&prod)];
    delegate_as(&prod, &donor, "vm/web", lease.token, &former);
    let mut control = former.resume(&donor, lease.token).expect("its lease");
    let mut pages = former.attach(&donor, lease.token).expect("its pages");
    // The same one keeps them.
    delegate_as(&prod, &donor, "vm/web", lease.token, &former);
    let _: LeaseStatus = control
        .call(FrameKind::Renew, &lease.token, FrameKind::Status)
        .expect("renewed");
    delegate_as(&prod, &donor, "vm/web", lease.token, &next);
    ends_soon(&mut control);
    ends_soon(&mut pages);
    let error = former.resume(&donor, lease.token).expect_err("unknown");
    assert!(is_refused_by_tls(&error), "{error}");
    next.resume(&donor, lease.token).expect("its lease");
    assert_eq!((known(&donor), donor.pool().leases()), (1, 1));
}

#[test]
fn a_process_ends_with_the_member_that_has_delegated_to_it() {
    let prod = Cluster::new("prod");
    let rule = |members: &str| Rule {
        members: members.parse().expect("a pattern"),
        limits: Amounts::default(),
        gids: Vec::new(),
    };
    let donor = prod.donor_with(16 * MIB, Some(vec![rule("vm/*")]));
    let begin = |process: &Process| {
        let (owner, lease) = lease_as(&prod, &donor, "vm/web");
        delegate_as(&prod, &donor, "vm/web", lease.token, process);
        let control = process.resume(&donor, lease.token).expect("its lease");
        let pages = process.attach(&donor, lease.token).expect("its pages");
        (owner, control, pages, lease.token)
    };
    let process = Process::of(&prod);
    let (_owner, mut control, mut pages, token) = begin(&process);
    let evicted = donor.evict(&"vm/web".parse().expect("a holder"));
    assert_eq!(evicted.leases, 1);
    ends_soon(&mut pages);
    ends_soon(&mut control);
    process.await_stranger(&donor, token);
    // No rule names the member any more.
    let (_owner, mut control, mut pages, token) = begin(&process);
    donor.reload(Some(vec![rule("vm/db")])).expect("read again");
    ends_soon(&mut pages);
    ends_soon(&mut control);
    process.await_stranger(&donor, token);
    donor.reload(Some(vec![rule("vm/*")])).expect("read again");
    // A revoked certificate ends connections, and not the lease.
    let (_owner, mut control, mut pages, token) = begin(&process);
    prod.renew_revoked("vm/web");
    prod.inform("node/alpha");
    donor.reload(None).expect("read again");
    ends_soon(&mut pages);
    ends_soon(&mut control);
    let (denied, text) = refusal(process.resume(&donor, token));
    assert_eq!(denied, Refusal::NotAllowed);
    assert!(
        text.contains("vm/web has delegated") && text.contains("evoked"),
        "{text}"
    );
    assert_eq!(
        refusal(process.attach(&donor, token)).0,
        Refusal::NotAllowed
    );
    delegate_as(&prod, &donor, "vm/web", token, &process);
    process.resume(&donor, token).expect("delegated again");
}

#[test]
fn a_process_ends_when_the_certificate_of_its_member_expires() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    let directory = prod.directory_of("vm/web");
    let until = SystemTime::now() + Duration::from_secs(6);
    let short = prod.odd(|parameters| parameters.not_after = until.into());
    std::fs::write(directory.join("cert.pem"), short.pem).expect("written");
    std::fs::write(directory.join("key.pem"), short.key.serialize_pem()).expect("written");
    let (_owner, lease) = lease_as(&prod, &donor, "vm/web");
    let process = Process::of(&prod);
    delegate_as(&prod, &donor, "vm/web", lease.token, &process);
    let mut control = process.resume(&donor, lease.token).expect("its lease");
    let mut pages = process.attach(&donor, lease.token).expect("its pages");
    let deadline = Instant::now() + PATIENCE;
    while control
        .call::<_, LeaseStatus>(FrameKind::Renew, &lease.token, FrameKind::Status)
        .is_ok()
    {
        assert!(Instant::now() < deadline, "it is used after it expired");
    }
    assert!(SystemTime::now() > until, "it was closed too early");
    ends_soon(&mut pages);
    let (denied, text) = refusal(process.resume(&donor, lease.token));
    assert_eq!(denied, Refusal::NotAllowed);
    assert!(text.contains("xpired"), "{text}");
}

#[test]
fn connections_of_a_process_count_for_its_member() {
    let prod = Cluster::new("prod");
    let limits = Amounts {
        connections: Some(3),
        ..Amounts::default()
    };
    let rule = Rule {
        members: "vm/web".parse().expect("a pattern"),
        limits,
        gids: Vec::new(),
    };
    let donor = prod.donor_with(16 * MIB, Some(vec![rule]));
    let (_owner, lease) = lease_as(&prod, &donor, "vm/web");
    let process = Process::of(&prod);
    delegate_as(&prod, &donor, "vm/web", lease.token, &process);
    // That of the request is one until its thread has ended.
    wait_until("a connection of vm/web does not end", || {
        let used = donor.pool().accounts().expect("a policy").used();
        used.values().all(|used| used.connections == 1)
    });
    let _control = process.resume(&donor, lease.token).expect("its lease");
    let _pages = process.attach(&donor, lease.token).expect("its pages");
    let (denied, text) = refusal(process.resume(&donor, lease.token));
    assert_eq!(denied, Refusal::NotAllowed);
    assert!(text.contains("raise connections="), "{text}");
    let mut without = process.connect(&donor);
    assert_eq!(refusal(ask(&mut without, MIB)).0, Refusal::NotAllowed);
}

/// Leases from the donor as the VM `vm/web`. Returns the lease with the credentials that it uses.
fn leased_as_web(cluster: &Cluster, donor: &Donor) -> (Leased, Arc<SharedCredentials>) {
    let expected = cluster.expected("vm/web", "alpha");
    let credentials = Arc::clone(&expected.credentials);
    let leased = Leased::obtain(LinkConfig {
        local: memory_fabric::NodeId(0).into(),
        node: memory_fabric::NodeId(1),
        address: donor.address(),
        carrier: Carrier::Tls(expected),
        vm: "web".to_owned(),
        bytes: MIB,
        or_less: false,
        grace: Duration::from_secs(5),
    });
    (leased.expect("a lease"), credentials)
}

#[test]
fn a_lease_is_delegated_again_when_its_owner_has_another_certificate() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    let (leased, credentials) = leased_as_web(&prod, &donor);
    let process = Process::of(&prod);
    let mut delegation = leased.delegation(process.certificate());
    assert_eq!(delegation.refresh().expect("done"), Delegated::Again);
    assert_eq!(delegation.refresh().expect("done"), Delegated::Same);
    prod.renew_revoked("vm/web");
    prod.inform("node/alpha");
    donor.reload(None).expect("read again");
    let token = leased.grant().token;
    assert_eq!(
        refusal(process.resume(&donor, token)).0,
        Refusal::NotAllowed
    );
    credentials.refresh();
    assert_eq!(delegation.refresh().expect("done"), Delegated::Again);
    let resumed = process.resume(&donor, token).expect("its lease");
    leased.hand_over();
    drop(resumed);
    donor.evict(&"vm/web".parse().expect("a holder"));
    prod.renew_revoked("vm/web");
    credentials.refresh();
    assert_eq!(delegation.refresh().expect("done"), Delegated::Ended);
    let began = Instant::now();
    process.await_stranger(&donor, token);
    assert!(began.elapsed() < PATIENCE);
}

/// The donor checks all certificates that it was shown, so it has to get to know those beside the
/// member's own.
#[test]
fn a_lease_is_delegated_again_when_its_owner_shows_the_same_certificate_with_others() {
    let prod = Cluster::new("prod");
    let donor = prod.donor(16 * MIB);
    let (leased, credentials) = leased_as_web(&prod, &donor);
    let process = Process::of(&prod);
    let mut delegation = leased.delegation(process.certificate());
    assert_eq!(delegation.refresh().expect("done"), Delegated::Again);
    let before = credentials.current().fingerprint();
    let directory = prod.directory_of("vm/web");
    let of_file = |file| std::fs::read_to_string(directory.join(file)).expect("a file");
    let chain = of_file("cert.pem") + &of_file("ca.pem");
    std::fs::write(directory.join("cert.pem"), chain).expect("written");
    assert_eq!(delegation.refresh().expect("done"), Delegated::Same);
    credentials.refresh();
    assert_eq!(credentials.current().fingerprint(), before, "its own");
    assert_eq!(delegation.refresh().expect("done"), Delegated::Again);
    assert_eq!(delegation.refresh().expect("done"), Delegated::Same);
    let resumed = process.resume(&donor, leased.grant().token);
    resumed.expect("its lease");
}

#[test]
fn a_donor_without_certificates_delegates_nothing() {
    let donor = donor(MIB);
    let mut control = ControlStream::connect(donor.address()).expect("a donor");
    let lease = ask(&mut control, MIB).expect("granted");
    let mut again = ControlStream::connect(donor.address()).expect("a donor");
    let (denied, text) = refusal(delegate(&mut again, lease.token, [1; 32].into()));
    assert_eq!(denied, Refusal::NotAllowed);
    assert!(text.contains("--credentials"), "{text}");
}
