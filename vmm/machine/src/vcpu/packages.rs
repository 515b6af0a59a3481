//! How the vCPUs of a machine are divided among packages: those of one share a cache, and the
//! guest's scheduler moves work between them gladly.

use ssi_hv_nodes::NodeNumber;

/// Packages of consecutive APIC ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packages {
    /// Number of vCPUs of the machine.
    cpus: u8,
    /// Bits of an APIC id that distinguish the cores of a package.
    pub id_bits: u8,
}

impl Packages {
    /// One package with all vCPUs.
    pub fn one(cpus: u8) -> Self {
        Self::with_id_bits(cpus, u8::MAX)
    }

    /// Packages whose cores so many bits distinguish.
    pub fn with_id_bits(cpus: u8, id_bits: u8) -> Self {
        let all = u32::from(cpus.max(1)).next_power_of_two().trailing_zeros();
        let all = u8::try_from(all).unwrap_or(u8::MAX);
        Self {
            cpus: cpus.max(1),
            id_bits: id_bits.min(all),
        }
    }

    /// The largest packages whose vCPUs have one owner each.
    pub fn by_node(owners: &[NodeNumber]) -> Self {
        let cpus = u8::try_from(owners.len()).unwrap_or(u8::MAX);
        let has_one_owner = |id_bits: u8| {
            let mut packages = owners.chunks(1 << id_bits);
            packages.all(|owners| owners.windows(2).all(|two| two[0] == two[1]))
        };
        let largest = (0..=7).rev().find(|id_bits| has_one_owner(*id_bits));
        Self::with_id_bits(
            cpus,
            match owners.iter().all(|owner| *owner == owners[0]) {
                true => u8::MAX,
                false => largest.unwrap_or(0),
            },
        )
    }

    /// The number of cores of the package that has this vCPU.
    pub fn cores_beside(self, cpu: u8) -> u32 {
        let size = 1_u32 << self.id_bits;
        let first = u32::from(cpu) & !(size - 1);
        u32::from(self.cpus).saturating_sub(first).clamp(1, size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_package_has_all_cores() {
        for (cpus, id_bits) in [(0, 0), (1, 0), (2, 1), (5, 3), (8, 3), (254, 8), (255, 8)] {
            let packages = Packages::one(cpus);
            assert_eq!(packages.id_bits, id_bits, "{cpus}");
            for cpu in [0, cpus.max(1) - 1] {
                assert_eq!(packages.cores_beside(cpu), u32::from(cpus.max(1)));
            }
        }
    }

    #[test]
    fn no_package_is_on_two_nodes() {
        for (owners, id_bits, cores) in [
            (&[0, 1][..], 0, &[1, 1][..]),
            (&[0, 0, 1, 1], 1, &[2, 2, 2, 2]),
            (&[0, 0, 0, 1], 0, &[1, 1, 1, 1]),
            (&[0, 0, 1], 1, &[2, 2, 1]),
            (
                &[0, 0, 0, 0, 1, 1, 1, 1, 2, 2],
                2,
                &[4, 4, 4, 4, 4, 4, 4, 4, 2, 2],
            ),
            (&[0, 0, 0, 0, 0], 3, &[5, 5, 5, 5, 5]),
            (&[], 0, &[]),
        ] {
            let packages = Packages::by_node(owners);
            assert_eq!(packages.id_bits, id_bits, "{owners:?}");
            let found = (0..).map(|cpu| packages.cores_beside(cpu));
            let found: Vec<_> = found.take(owners.len()).collect();
            assert_eq!(found, cores, "{owners:?}");
            let received = Packages::with_id_bits(packages.cpus, packages.id_bits);
            assert_eq!(received, packages);
        }
        let many = [[0; 127], [1; 127]].concat();
        assert_eq!(Packages::by_node(&many).id_bits, 0);
        assert_eq!(
            Packages::by_node(&[[0; 128], [1; 128]].concat()[..254]).id_bits,
            7
        );
    }
}
