//! Stands in for the crate `ring` under Miri, which runs no assembly. It protects nothing.

/// Of FNV-1a.
const BASIS: u64 = 0xcbf2_9ce4_8422_2325;

fn mix(state: u64, bytes: &[u8]) -> u64 {
    let step = |state: u64, byte: &u8| (state ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(state, step)
}

pub(super) mod aead {
    use super::{BASIS, mix};

    pub(crate) const NONCE_LEN: usize = 12;
    pub(crate) static AES_128_GCM: Algorithm = Algorithm(16);
    pub(crate) static AES_256_GCM: Algorithm = Algorithm(32);
    pub(crate) static CHACHA20_POLY1305: Algorithm = Algorithm(32);

    const TAG: usize = 16;

    #[derive(Debug)]
    pub(crate) struct Unspecified;
    pub(crate) struct Algorithm(usize);
    pub(crate) struct Aad<A>(A);
    pub(crate) struct Nonce([u8; NONCE_LEN]);
    pub(crate) struct UnboundKey(u64);
    pub(crate) struct LessSafeKey(u64);

    impl Algorithm {
        pub(crate) fn key_len(&self) -> usize {
            self.0
        }
    }

    impl<A> From<A> for Aad<A> {
        fn from(data: A) -> Self {
            Self(data)
        }
    }

    impl Nonce {
        pub(crate) fn assume_unique_for_key(nonce: [u8; NONCE_LEN]) -> Self {
            Self(nonce)
        }
    }

    impl UnboundKey {
        pub(crate) fn new(algorithm: &Algorithm, key: &[u8]) -> Result<Self, Unspecified> {
            match key.len() == algorithm.0 {
                true => Ok(Self(mix(BASIS, key))),
                false => Err(Unspecified),
            }
        }
    }

    impl LessSafeKey {
        pub(crate) fn new(key: UnboundKey) -> Self {
            Self(key.0)
        }

        fn apply(&self, nonce: &Nonce, payload: &mut [u8]) {
            let mask = mix(self.0, &nonce.0).to_le_bytes();
            let masked = payload.iter_mut().zip(mask.iter().cycle());
            masked.for_each(|(byte, mask)| *byte ^= mask);
        }

        fn tag(&self, nonce: &Nonce, associated: &[u8], sealed: &[u8]) -> [u8; TAG] {
            let tag = mix(mix(mix(self.0, &nonce.0), associated), sealed).to_le_bytes();
            std::array::from_fn(|i| tag[i % tag.len()])
        }

        pub(crate) fn seal_in_place_separate_tag<A: AsRef<[u8]>>(
            &self,
            nonce: Nonce,
            Aad(associated): Aad<A>,
            payload: &mut [u8],
        ) -> Result<[u8; TAG], Unspecified> {
            self.apply(&nonce, payload);
            Ok(self.tag(&nonce, associated.as_ref(), payload))
        }

        pub(crate) fn open_in_place<'a, A: AsRef<[u8]>>(
            &self,
            nonce: Nonce,
            Aad(associated): Aad<A>,
            sealed: &'a mut [u8],
        ) -> Result<&'a mut [u8], Unspecified> {
            let (payload, tag) = sealed.split_last_chunk_mut().ok_or(Unspecified)?;
            if *tag != self.tag(&nonce, associated.as_ref(), payload) {
                return Err(Unspecified);
            }
            self.apply(&nonce, payload);
            Ok(payload)
        }
    }
}

pub(super) mod hkdf {
    use super::{BASIS, aead::Unspecified, mix};

    pub(crate) const HKDF_SHA256: () = ();

    pub(crate) trait KeyType {
        fn len(&self) -> usize;
    }

    pub(crate) struct Prk(u64);
    pub(crate) struct Okm(u64, usize);

    impl Prk {
        pub(crate) fn new_less_safe((): (), secret: &[u8]) -> Self {
            Self(mix(BASIS, secret))
        }

        pub(crate) fn expand(
            &self,
            info: &[&[u8]],
            length: impl KeyType,
        ) -> Result<Okm, Unspecified> {
            let state = info.iter().fold(self.0, |state, part| mix(state, part));
            Ok(Okm(state, length.len()))
        }
    }

    impl Okm {
        pub(crate) fn fill(self, to: &mut [u8]) -> Result<(), Unspecified> {
            assert_eq!(to.len(), self.1);
            for (i, byte) in to.iter_mut().enumerate() {
                *byte = mix(self.0, &[i as u8]) as u8;
            }
            Ok(())
        }
    }
}
