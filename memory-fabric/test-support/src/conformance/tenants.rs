//! Members of a cluster that use the same memory of a node, one after the other.

use super::cases::{Bed, Options, PAGES};
use super::remote::{BYTES, Remote};
use fabric_identity::{ExpectedNode, Role, SharedCredentials};
use fabric_pki::{Authority, Validity};
use fabric_transport::PathKind;
use fabric_transport::rdma::DeviceChoice;
use fabric_transport::stream::Carrier;
use fabric_wire::RUN_PAGES_MAX;
use memory_fabric::donor::server::{Donor, DonorConfig};
use memory_fabric::fabric::{Compression, SPIN_DEFAULT};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

const MEMBERS: [&str; 3] = ["vm/a", "vm/b", "vm/c"];
const ROUNDS: u32 = 2;

/// Has three members, each with its own certificate, in turn lease all memory of a donor at `here`,
/// find nothing of another in it, and fill it. Pages travel by `way`, and are not sealed.
///
/// # Panics
/// Panics when a member finds anything but zeroes in new memory, or not what it wrote itself.
pub fn in_turn(here: IpAddr, way: PathKind) {
    let directory = tempfile::tempdir().expect("a directory");
    let cluster = "bed".parse().expect("a name");
    // Valid for longer than what it issues later.
    let validity = Validity { days: 60 };
    let authority = Authority::create(&directory.path().join("authority"), cluster, validity);
    let validity = Validity { days: 30 };
    let mut authority = authority.expect("an authority");
    let mut member = |holder: &str, role| -> Arc<SharedCredentials> {
        let path = directory.path().join(holder);
        let named = holder.parse().expect("a holder");
        authority
            .issue(&named, validity, &path)
            .expect("a certificate");
        SharedCredentials::load(&path, role).expect("credentials")
    };
    let donor = Donor::start(&DonorConfig {
        credentials: Some(member("node/alpha", Role::Node)),
        listen: (here, 0).into(),
        memory_bytes: BYTES,
        lease_duration_max: Duration::from_secs(60),
        spin: SPIN_DEFAULT,
        rdma: match way {
            PathKind::Rdma => DeviceChoice::Automatic,
            _ => DeviceChoice::None,
        },
        allow: None,
    });
    let donor = donor.expect("a donor");
    let beds = MEMBERS.map(|holder| {
        let node = ExpectedNode {
            credentials: member(holder, Role::Vm),
            name: "alpha".parse().expect("a name"),
        };
        let carrier = match way {
            PathKind::Udp => Carrier::Quic(node),
            _ => Carrier::Tls(node),
        };
        let bed = Remote::new(&donor, donor.address(), carrier);
        match way {
            PathKind::Rdma => bed.by_rdma(),
            _ => bed,
        }
    });
    let plain = Options {
        compression: Compression::Off,
        checksum: false,
    };
    let mut version = 0;
    for _ in 0..ROUNDS {
        for bed in &beds {
            let mut lines = bed.open(plain);
            lines.urgent.verify(0..PAGES, 0);
            lines.ahead.verify_runs(0..PAGES, 0, RUN_PAGES_MAX);
            version += 1;
            lines.bulk.write(0..PAGES, version);
            lines.urgent.verify(0..PAGES, version);
            drop(lines);
            assert_eq!(bed.leases(), 0, "the lease is kept");
        }
    }
    assert_eq!(donor.pool().granted.get(), u64::from(version));
    if way == PathKind::Rdma {
        for bed in &beds {
            let (read, written) = bed.by_rdma_without_failure();
            // Some may travel by TCP before the connection by RDMA is there.
            assert!(
                read >= u64::from(PAGES) && written >= u64::from(PAGES),
                "{read} pages were read by RDMA, and {written} written"
            );
        }
    }
}
